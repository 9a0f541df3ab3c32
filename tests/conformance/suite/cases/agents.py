"""Plain graphs, single agents, and their tools."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from tests.conformance.suite.harness import Expect, Kit, Program, in_two_modes, same, topology
from tests.conformance.suite.nodes import talk
from tests.conformance.suite.tools import LOOK, WEIGH, drop, look, run_agent, weigh

SAFETY = '{"what": "door", "safe": true}'


class Safety(BaseModel):
    """What was found."""

    what: str
    safe: bool


def alone(node: Any) -> Any:
    graph = StateGraph(MessagesState).add_node("answer", node)
    return graph.add_edge(START, "answer").compile()


@topology("no graph at all", Expect("", "hello"))
def no_graph(kit: Kit) -> Program:
    prompt = ChatPromptTemplate.from_messages([("system", "Be kind."), ("user", "{question}")])
    chain = prompt | kit.model | StrOutputParser()
    yield kit.run(chain, {"question": kit.says("hello")})


@topology(
    "a prompt in every form",
    *(Expect("answer", said, step=1, task="node") for said in ("one", "two", "three", "four")),
)
def every_form(kit: Kit) -> Program:
    forms = [
        kit.says("one"),
        [("system", "Be kind."), ("user", kit.says("two"))],
        [{"role": "user", "content": [{"type": "text", "text": kit.says("three")}]}],
        [SystemMessage("Be kind."), HumanMessage(kit.says("four"), name="ann")],
    ]

    def node(state: Any) -> Any:
        said: list[Any] = []
        for form in forms:
            said.append((yield form))
        return {"messages": said}

    yield kit.run(alone(talk(kit, node)), {"messages": []})


@topology("a node that streams", Expect("answer", "hello there", step=1))
def streaming_node(kit: Kit) -> Program:
    def node(state: Any) -> Any:
        chunks = list(kit.model.stream(state["messages"]))
        return {"messages": [sum(chunks[1:], chunks[0])]}

    async def anode(state: Any) -> Any:
        chunks = [chunk async for chunk in kit.model.astream(state["messages"])]
        return {"messages": [sum(chunks[1:], chunks[0])]}

    yield kit.run(alone(anode if kit.asynchronous else node), kit.ask("hello there"))


@topology(
    "tags and node metadata",
    Expect("answer", "hello", step=1, tags=("run", "model", "node")),
    remark="LangChain's tags, and `art_tags` in a node's metadata",
)
def tagged(kit: Kit) -> Program:
    chain = StateGraph(MessagesState)
    node = kit.node(kit.chat(tags=["model"]))
    chain.add_node("answer", node, metadata={"art_tags": ["node"]}).add_edge(START, "answer")
    yield kit.run(chain.compile(), kit.ask("hello"), {"tags": ["run"]})


@topology(
    "content blocks",
    *Expect.turns("model", "look", "a door"),
    Expect("model", "still a door", step=1),
    remark='`output_version="v1"`: the prompt repeats replies as lists of blocks',
)
def content_blocks(kit: Kit) -> Program:
    agent = create_agent(kit.chat(output_version="v1"), [look])
    state = yield kit.run(agent, kit.ask(LOOK, "a door", "still a door"))
    yield kit.run(agent, {"messages": [*state["messages"], HumanMessage("Look again.")]})


@topology(
    "events, version 2",
    *Expect.turns("model", "look", "a door"),
    modes=("astream",),
    remark="`astream_events`, which has no synchronous twin",
)
def events(kit: Kit) -> Program:
    agent = create_agent(kit.model, [look])

    async def read() -> None:
        async for _ in agent.astream_events(kit.ask(LOOK, "a door"), version="v2"):
            pass

    yield read


@topology(
    "events, version 3",
    *Expect.turns("model", "look", "a door"),
    modes=("stream", "astream"),
    remark="`stream_events`, `astream_events`",
)
def newer_events(kit: Kit) -> Program:
    agent = create_agent(kit.model, [look])
    asked = kit.ask(LOOK, "a door")

    async def aread() -> None:
        async for _ in await agent.astream_events(asked, version="v3"):
            pass

    def read() -> None:
        for _ in agent.stream_events(asked, version="v3"):
            pass

    yield aread if kit.asynchronous else read


@topology(
    "a handler in the config",
    *Expect.turns("model", "look", "a door"),
    heard="handler",
    remark="`CaptureHandler` among the callbacks, no scope",
)
def config_handler(kit: Kit) -> Program:
    agent = create_agent(kit.model, [look])
    yield kit.run(agent, kit.ask(LOOK, "a door"), {"callbacks": [kit.handler]})


@topology("create_agent with tools", *Expect.turns("model", "look", "weigh", "a heavy door"))
def tool_agent(kit: Kit) -> Program:
    agent = create_agent(kit.model, [look, weigh], system_prompt="Look around.")
    yield kit.run(agent, kit.ask(LOOK, WEIGH, "a heavy door"))


@topology(
    "a named agent",
    *Expect.turns("model", "look", "a door"),
    remark="the agent signs its replies (`name`); the prompt repeats them signed",
)
def named_agent(kit: Kit) -> Program:
    yield run_agent(kit, LOOK, "a door", name="scout")


@topology(
    "a tool that fails",
    *Expect.turns("agent", "drop", "it is stuck"),
    remark="create_react_agent; LangGraph answers the model with the error; nothing is excluded",
)
def failing_tool(kit: Kit) -> Program:
    agent = create_react_agent(kit.model, ToolNode([drop], handle_tool_errors=True))
    yield kit.run(agent, kit.ask({"call": "drop"}, "it is stuck"))


@topology(
    "a tool call that is not JSON",
    Expect("model", "<tool_call>\n{broken\n</tool_call>", step=1),
)
def broken_call(kit: Kit) -> Program:
    yield run_agent(kit, "<tool_call>\n{broken\n</tool_call>", "sorry")


@topology(
    "structured output by the provider",
    *Expect.turns("model", "look", SAFETY),
    remark="a grammar shapes every reply of such an agent; learned from over what it allowed",
)
def provider_strategy(kit: Kit) -> Program:
    agent = create_agent(kit.model, [look], response_format=ProviderStrategy(Safety))
    state = yield kit.run(agent, kit.ask(LOOK, SAFETY))
    same("the response", state["structured_response"], Safety(what="door", safe=True))


@topology(
    "structured output by a tool call",
    *Expect.turns("model", "look", "Safety"),
    remark="the agent forces a tool call, which a grammar shapes",
)
def tool_strategy(kit: Kit) -> Program:
    agent = create_agent(kit.model, [look], response_format=ToolStrategy(Safety))
    call = {"call": "Safety", "args": {"what": "door", "safe": True}}
    state = yield kit.run(agent, kit.ask(LOOK, call))
    same("the response", state["structured_response"], Safety(what="door", safe=True))


@topology(
    "the best of three, by a critic",
    Expect("answer", "hello", step=1, task="node", why="superseded_unchosen"),
    Expect("answer", "hello", step=1, task="node"),
    Expect("answer", "hello", step=1, task="node", why="superseded_unchosen"),
    Expect("answer", "the second", step=1, task="node"),
    remark="one prompt, three replies, one at another temperature: the node returns one of them",
)
def best_of_three(kit: Kit) -> Program:
    def node(state: Any) -> Any:
        yield kit.model.bind(temperature=0.7), state["messages"]
        second = yield state["messages"]
        yield state["messages"]
        yield kit.says("the second")
        return {"messages": [second]}

    yield kit.run(alone(talk(kit, node)), kit.ask("hello"))


@topology(
    "three votes",
    *(Expect("answer", "hello", step=1, task="node") for _ in range(3)),
    remark="one prompt, three equal replies, and what all of them say is returned: all count",
)
def votes(kit: Kit) -> Program:
    def node(state: Any) -> Any:
        heard: list[str] = []
        for _ in range(3):
            heard.append((yield state["messages"]).text)
        return {"messages": [("ai", max(set(heard), key=heard.count))]}

    yield kit.run(alone(talk(kit, node)), kit.ask("hello"))


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
