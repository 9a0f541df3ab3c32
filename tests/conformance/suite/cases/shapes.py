"""Graphs that jump, remember, share a store, hand over, or hand out what a node is to know."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableBranch, RunnableLambda, RunnableParallel
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent
from langgraph.runtime import Runtime
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command, Send

from tests.conformance.suite.harness import Expect, Kit, Program, in_two_modes
from tests.conformance.suite.nodes import Said, chain, line, talk
from tests.conformance.suite.outcomes import holds
from tests.conformance.suite.tools import LOOK, drop, look, run_agent


@in_two_modes(
    "Command(goto) to two nodes at once",
    *Expect.line(fork="both", left="l"),
    Expect("right", "r", step=2),
    ordered=False,
)
def goto_two(kit: Kit) -> Program:
    fork = chain(kit, "both", then=lambda state: Command(goto=["left", "right"]))
    graph = StateGraph(Said).add_node("fork", fork, destinations=("left", "right"))
    graph.add_node("left", chain(kit, "l")).add_node("right", chain(kit, "r"))
    yield kit.run(graph.add_edge(START, "fork").compile(), {"said": []})


@in_two_modes(
    "Command(goto) with Send, and a node that waits for all",
    Expect("plan", "three", step=1),
    *(Expect("work", "w", step=2, task=f"work {number}") for number in range(3)),
    Expect("sum", "s", step=3),
    ordered=False,
)
def goto_send(kit: Kit) -> Program:
    sends = [Send("work", {"said": []}) for _ in range(3)]
    plan = chain(kit, "three", then=lambda state: Command(goto=sends))
    graph = StateGraph(Said).add_node("plan", plan, destinations=("work",))
    graph.add_node("work", chain(kit, "w")).add_node("sum", chain(kit, "s"), defer=True)
    graph.add_edge(START, "plan").add_edge("work", "sum")
    yield kit.run(graph.compile(), {"said": []})


@in_two_modes(
    "a graph that calls itself",
    Expect("work", "three", step=1, task="a"),
    Expect("work/work", "two", step=1),
    Expect("work/work/work", "one", step=1),
)
def recursive(kit: Kit) -> Program:
    def work(state: Any) -> Generator[Any, AIMessage, Any]:
        reply = yield state["messages"]
        messages = [*state["messages"], reply]
        if reply.text != "one":
            yield graph, {"messages": messages}
        return {"messages": [reply]}

    graph = line(MessagesState, work=talk(kit, work)).compile()
    yield kit.run(graph, kit.ask("three", "two", "one"))


@in_two_modes(
    "a subgraph without checkpoints",
    Expect("team/work", "one", step=1, task="first"),
    Expect("check", "fine", step=2),
    threaded=True,
    remark="`compile(checkpointer=False)`",
)
def forgetting(kit: Kit) -> Program:
    team = line(MessagesState, work=kit.node()).compile(checkpointer=False)
    graph = line(MessagesState, team=team, check=kit.node())
    yield kit.run(graph.compile(checkpointer=InMemorySaver()), kit.ask("one", "fine"))


@in_two_modes(
    "a state written by hand, as of a node",
    Expect("act", "a", step=1),
    threaded=True,
    remark="`update_state(as_node=…)`: the first node is never run",
)
def as_node(kit: Kit) -> Program:
    agent = line(MessagesState, plan=kit.node(), act=kit.node()).compile(InMemorySaver())
    agent.update_state(kit.config, kit.ask("a"), as_node="plan")
    yield kit.run(agent, None)


@in_two_modes("a store between two nodes", *Expect.line(write="a secret", read="told"))
def stored(kit: Kit) -> Program:
    store = InMemoryStore()
    write = chain(kit, "a secret", then=lambda state: store.put(("notes",), "1", {"said": "told"}))

    def read(state: Any) -> Generator[Any, AIMessage, Any]:
        found = store.get(("notes",), "1")
        holds(found, "the store lost what was put into it")
        reply = yield kit.says(found.value["said"])
        return {"said": [reply.text]}

    yield kit.run(line(Said, write=write, read=talk(kit, read)).compile(store=store), {"said": []})


@dataclass
class Who:
    """A run's context."""

    name: str


@in_two_modes(
    "a context that names the model",
    Expect("answer", "hello", step=1, why="other_policy"),
    Expect("check", "fine", step=2),
    remark="`context_schema`, and `Runtime` in the node",
)
def contextual(kit: Kit) -> Program:
    def answer(state: MessagesState, runtime: Runtime[Who]) -> Any:
        reply = yield kit.chat(runtime.context.name), state["messages"]
        return {"messages": [reply]}

    graph = StateGraph(MessagesState, context_schema=Who)
    graph.add_node("answer", talk(kit, answer))
    graph.add_node("check", kit.node()).add_edge(START, "answer").add_edge("answer", "check")
    yield kit.run(graph.compile(), kit.ask("hello", "fine"), context=Who(kit.rival))


@in_two_modes(
    "a tool whose result is the answer",
    Expect("model", "finish", step=1),
    remark="`return_direct`",
)
def direct(kit: Kit) -> Program:
    @tool(return_direct=True)
    def finish() -> str:
        """Finish."""
        return "finished"

    yield run_agent(kit, {"call": "finish"}, "never", tools=[finish])


@in_two_modes(
    "a ToolNode of one's own, which tells of errors",
    *Expect.turns("model", "drop", "it is stuck"),
    remark="`ToolNode(handle_tool_errors=…)`",
)
def own_tool_node(kit: Kit) -> Program:
    graph = StateGraph(MessagesState).add_node("model", kit.node(kit.model.bind_tools([drop])))
    graph.add_node("tools", ToolNode([drop], handle_tool_errors="It failed."))
    graph.add_edge(START, "model").add_edge("tools", "model")

    def onward(state: Any) -> str:
        return "tools" if state["messages"][-1].tool_calls else "__end__"

    graph.add_conditional_edges("model", onward, ["tools", "__end__"])
    asked = {"call": "drop", "args": {"what": "door"}}
    yield kit.run(graph.compile(), kit.ask(asked, "it is stuck"))


@in_two_modes(
    "runnables in parallel as a node",
    *Expect.turns("both", "same", "same", apart=0, task="node"),
    ordered=False,
    remark="`RunnableParallel`",
)
def parallel_runnables(kit: Kit) -> Program:
    prompt = RunnableLambda(lambda state: kit.says("same"))
    asks = RunnableParallel(left=prompt | kit.model, right=prompt | kit.model)
    both = asks | (lambda said: {"messages": [said["left"], said["right"]]})
    yield kit.run(line(MessagesState, both=both).compile(), {"messages": []})


@in_two_modes(
    "a runnable that chooses, as a node",
    Expect("choose", "short", step=1),
    remark="`RunnableBranch`",
)
def branching_runnable(kit: Kit) -> Program:
    asks = RunnableLambda(lambda state: state["messages"]) | kit.model
    never = RunnableLambda(lambda state: AIMessage("never"))
    choose = RunnableBranch((lambda state: len(state["messages"]) == 1, asks), never)
    node = choose | (lambda said: {"messages": [said]})
    yield kit.run(line(MessagesState, choose=node).compile(), kit.ask("short"))


@in_two_modes(
    "a swarm that hands over and back",
    Expect("scout/agent", "transfer_to_smith", step=1),
    Expect("smith/agent", "transfer_to_scout", step=1),
    Expect("scout/agent", "a door", step=1, task="back"),
    remark="langgraph-swarm",
)
def swarm_and_back(kit: Kit) -> Program:
    from langgraph_swarm import create_handoff_tool, create_swarm

    agents = [
        create_react_agent(kit.model, [create_handoff_tool(agent_name=other)], name=name)
        for name, other in (("scout", "smith"), ("smith", "scout"))
    ]
    team = create_swarm(agents, default_active_agent="scout").compile()
    there, back = {"call": "transfer_to_smith"}, {"call": "transfer_to_scout"}
    yield kit.run(team, kit.ask(there, back, "a door"))


@in_two_modes(
    "a supervisor that keeps every message",
    Expect("supervisor/agent", "transfer_to_scout", step=1),
    *Expect.turns("scout/agent", "look", "a door"),
    Expect("supervisor/agent", "it is a door", step=1),
    remark='langgraph-supervisor, `output_mode="full_history"`',
)
def full_history(kit: Kit) -> Program:
    from langgraph_supervisor import create_supervisor

    scout = create_react_agent(kit.model, [look], name="scout")
    team = create_supervisor([scout], model=kit.model, output_mode="full_history").compile()
    asked = kit.ask({"call": "transfer_to_scout"}, LOOK, "a door", "unused", "it is a door")
    yield kit.run(team, asked)
