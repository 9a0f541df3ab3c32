"""Tools that steer, ask and remember; what a thread and a store keep between turns."""

from __future__ import annotations

from typing import Annotated, Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, RemoveMessage, ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.prebuilt import InjectedState, ToolNode, tools_condition
from langgraph.types import Command, Send, interrupt

from tests.conformance.suite.harness import Expect, Kit, Program, in_two_modes
from tests.conformance.suite.nodes import line, talk
from tests.conformance.suite.tools import LOOK, look, run_agent


@in_two_modes(
    "a tool node in a graph of one's own",
    *Expect.turns("agent", "look, look", "two doors"),
    remark="`ToolNode`, `tools_condition`",
)
def tool_node(kit: Kit) -> Program:
    graph = StateGraph(MessagesState).add_node("agent", kit.node(kit.model.bind_tools([look])))
    graph.add_node("tools", ToolNode([look])).add_edge(START, "agent").add_edge("tools", "agent")
    graph.add_conditional_edges("agent", tools_condition)
    yield kit.run(graph.compile(), kit.ask({"calls": [LOOK, LOOK]}, "two doors"))


@in_two_modes(
    "tool calls sent one by one",
    *Expect.turns("agent", "look, look", "two doors"),
    remark="`Send` of each call to the tool node",
)
def sent_calls(kit: Kit) -> Program:
    def onward(state: Any) -> Any:
        return [Send("tools", [call]) for call in state["messages"][-1].tool_calls]

    graph = StateGraph(MessagesState).add_node("agent", kit.node(kit.model.bind_tools([look])))
    graph.add_node("tools", ToolNode([look])).add_edge(START, "agent").add_edge("tools", "agent")
    graph.add_conditional_edges("agent", onward, ["tools", "__end__"])
    yield kit.run(graph.compile(), kit.ask({"calls": [LOOK, LOOK]}, "two doors"))


@in_two_modes(
    "a tool that steers the graph",
    Expect("desk", "pass_on", step=1),
    Expect("expert", "solved", step=3),
    remark="a tool's `Command(goto=…, update=…)`",
)
def steering_tool(kit: Kit) -> Program:
    @tool
    def pass_on(id: Annotated[str, InjectedToolCallId]) -> Command[Any]:
        """Pass on."""
        done = ToolMessage("Passed on.", tool_call_id=id)
        return Command(goto="expert", update={"messages": [done]})

    graph = line(MessagesState, desk=kit.node(kit.model.bind_tools([pass_on])))
    graph.add_node("tools", ToolNode([pass_on])).add_edge("desk", "tools")
    graph.add_node("expert", kit.node())
    yield kit.run(graph.compile(), kit.ask({"call": "pass_on"}, "solved"))


@in_two_modes(
    "a tool that is given the state and asks the model",
    *Expect.line(model="count", tools="one message"),
    Expect("model", "so many", step=3),
    remark="`InjectedState`",
)
def state_tool(kit: Kit) -> Program:
    def count(state: Annotated[Any, InjectedState]) -> Any:
        """Count."""
        return (yield kit.says("one message") + str(len(state["messages"]))).text

    yield run_agent(kit, {"call": "count"}, "so many", tools=[tool(talk(kit, count))])


@in_two_modes(
    "a tool that asks a person",
    *Expect.turns("model", "confirm", "as you wish"),
    threaded=True,
    remark="`interrupt` in a tool: the model's own node is not run again",
)
def asking_tool(kit: Kit) -> Program:
    @tool
    def confirm() -> str:
        """Ask a person."""
        return interrupt("sure?")

    agent = create_agent(kit.model, [confirm], checkpointer=InMemorySaver())
    yield kit.run(agent, kit.ask({"call": "confirm"}, "as you wish"))
    yield kit.run(agent, Command(resume="yes"))


@in_two_modes(
    "a subgraph with a memory of its own",
    *Expect.turns("team/work", "one", "two", apart=3),
    threaded=True,
    remark="`compile(checkpointer=True)`: its thread goes on in the second turn",
)
def subgraph_memory(kit: Kit) -> Program:
    team = line(MessagesState, work=kit.node()).compile(checkpointer=True)
    agent = line(MessagesState, team=team).compile(checkpointer=InMemorySaver())
    yield kit.run(agent, kit.ask("one", "two"))
    yield kit.run(agent, {"messages": [("user", "And?")]})


@in_two_modes(
    "a subgraph without checkpoints, made again after an interrupt",
    Expect("team/work", "one", step=1, task="work", why="superseded_interrupted"),
    Expect("team/work", "one", step=1, task="again"),
    threaded=True,
    remark="`compile(checkpointer=False)` around a node that asks a person after it",
)
def subgraph_forgets(kit: Kit) -> Program:
    team = line(MessagesState, work=kit.node()).compile(checkpointer=False)

    def node(state: Any) -> Any:
        said = yield team, state
        return {"messages": [said["messages"][-1], HumanMessage(interrupt("sure?"))]}

    agent = line(MessagesState, team=talk(kit, node)).compile(checkpointer=InMemorySaver())
    yield kit.run(agent, kit.ask("one"))
    yield kit.run(agent, Command(resume="yes"))


@in_two_modes(
    "a history that is erased",
    Expect("first", "one", step=1),
    Expect("second", "two", step=3),
    remark="`RemoveMessage(REMOVE_ALL_MESSAGES)`: the next prompt starts a row",
)
def erased(kit: Kit) -> Program:
    def forget(state: Any) -> Any:
        anew = HumanMessage(kit.says("two"))
        return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), anew]}

    graph = line(MessagesState, first=kit.node(), forget=forget, second=kit.node())
    yield kit.run(graph.compile(), kit.ask("one"))
