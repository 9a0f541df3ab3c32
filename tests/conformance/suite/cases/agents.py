"""Plain graphs and single agents."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent
from pydantic import BaseModel

from tests.conformance.suite.harness import Expect, Kit, Program, topology
from tests.conformance.suite.nodes import talk
from tests.conformance.suite.outcomes import same
from tests.conformance.suite.tools import LOOK, WEIGH, drop, look, run_agent, weigh

SAFETY = '{"what": "door", "safe": true}'


class Safety(BaseModel):
    """What was found."""

    what: str
    safe: bool


def alone(node: Any, **options: Any) -> Any:
    """A graph of one node."""
    graph = StateGraph(MessagesState).add_node("answer", node, **options)
    return graph.add_edge(START, "answer").compile()


@topology("a single node", Expect("answer", "hello", step=1))
def single_node(kit: Kit) -> Program:
    yield kit.run(alone(kit.node()), kit.ask("hello"))


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
    "a chain as a node",
    Expect("answer", "hello", step=1, tags=("run",)),
    remark="prompt, model and parser in one runnable",
)
def chain_node(kit: Kit) -> Program:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Be kind."), ("placeholder", "{messages}")]
    )
    chain = prompt | kit.model | (lambda reply: {"messages": [reply]})
    yield kit.run(alone(chain), kit.ask("hello"), {"tags": ["run"]})


@topology(
    "a model chosen at run time",
    Expect("answer", "hello", step=1),
    remark="`configurable_alternatives`",
)
def configurable(kit: Kit) -> Program:
    model = kit.foreign().configurable_alternatives(
        ConfigurableField("model"), default_key="foreign", ours=kit.model
    )
    graph = alone(kit.node(model))
    yield kit.run(graph, kit.ask("hello"), {"configurable": {"model": "ours"}})


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


@topology("parallel tool calls", *Expect.turns("model", "Both.", "a heavy door"))
def parallel_tools(kit: Kit) -> Program:
    agent = create_agent(kit.model, [look, weigh])
    yield kit.run(agent, kit.ask({"say": "Both.", "calls": [LOOK, WEIGH]}, "a heavy door"))


@topology(
    "a tool that fails",
    *Expect.turns("agent", "drop", "it is stuck"),
    remark="LangGraph answers the model with the error; nothing is excluded",
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
    "with_structured_output in a node",
    *Expect.turns("answer", SAFETY, "so it is", apart=0, task="node"),
)
def structured_node(kit: Kit) -> Program:
    shaped = kit.model.with_structured_output(Safety)

    def node(state: Any) -> Any:
        verdict = yield shaped, state["messages"]
        return {"messages": [(yield kit.says("so it is") + str(verdict.safe))]}

    yield kit.run(alone(talk(kit, node)), kit.ask(SAFETY))


@topology(
    "create_react_agent",
    *Expect.turns("agent", "look", "a door"),
    remark="langgraph.prebuilt's, from before create_agent",
)
def react_agent(kit: Kit) -> Program:
    agent = create_react_agent(kit.model, [look], prompt="Look around.")
    yield kit.run(agent, kit.ask(LOOK, "a door"))


@topology(
    "create_react_agent with a response format",
    *Expect.turns("agent", "look", "a door"),
    Expect("generate_structured_response", SAFETY, step=4),
)
def react_structured(kit: Kit) -> Program:
    agent = create_react_agent(kit.model, [look], response_format=Safety)
    yield kit.run(agent, kit.ask(LOOK, "a door", SAFETY))


@topology(
    "several choices of one request",
    Expect("answer", "hello", step=1, task="node"),
    *Expect.turns("answer", "hello", "hello", apart=0, task="node", why="superseded_unchosen"),
    modes=("invoke", "ainvoke"),
    remark="`n=3`; the server streams one choice only",
)
def several_choices(kit: Kit) -> Program:
    yield kit.run(alone(kit.node(kit.chat(n=3))), kit.ask("hello"))


@topology(
    "the best of three, by a critic",
    Expect("answer", "hello", step=1, task="node", why="superseded_unchosen"),
    Expect("answer", "hello", step=1, task="node"),
    Expect("answer", "hello", step=1, task="node", why="superseded_unchosen"),
    Expect("answer", "the second", step=1, task="node"),
    remark="one prompt, three replies: the node returns one of them",
)
def best_of_three(kit: Kit) -> Program:
    def node(state: Any) -> Any:
        yield state["messages"]
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
