"""Graphs in graphs, in nodes and in tools; several agents; the functional API."""

from __future__ import annotations

from functools import partial
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langgraph.func import entrypoint, task
from langgraph.graph import MessagesState
from langgraph.prebuilt import create_react_agent

from tests.conformance.suite.harness import Expect, Kit, Program, topology
from tests.conformance.suite.nodes import line, talk
from tests.conformance.suite.tools import LOOK, WEIGH, look, run_agent, weigh

chain = partial(line, MessagesState)


@topology(
    "subgraphs two deep, as nodes",
    Expect("plan", "outer", step=1),
    Expect("team/plan", "middle", step=1),
    Expect("team/pair/work", "inner", step=1),
    Expect("check", "last", step=3),
)
def subgraph_nodes(kit: Kit) -> Program:
    pair = chain(work=kit.node()).compile()
    team = chain(plan=kit.node(), pair=pair).compile()
    graph = chain(plan=kit.node(), team=team, check=kit.node()).compile()
    yield kit.run(graph, kit.ask("outer", "middle", "inner", "last"))


@topology(
    "subgraphs two deep, called in nodes",
    Expect("team/pair/work", "inner", step=1),
    Expect("team/check", "middle", step=2),
    Expect("check", "last", step=2),
)
def subgraph_calls(kit: Kit) -> Program:
    def calling(graph: Any) -> Any:
        def node(state: Any) -> Any:
            return (yield graph, state)

        return talk(kit, node)

    pair = chain(work=kit.node()).compile()
    team = chain(pair=calling(pair), check=kit.node()).compile()
    graph = chain(team=calling(team), check=kit.node()).compile()
    yield kit.run(graph, kit.ask("inner", "middle", "last"))


@topology(
    "a model inside of a tool",
    *Expect.line(model="ask", tools="blue"),
    Expect("model", "it is blue", step=3),
)
def model_in_tool(kit: Kit) -> Program:
    def ask() -> Any:
        """Ask."""
        return (yield kit.says("blue")).text

    yield run_agent(kit, {"call": "ask"}, "it is blue", tools=[tool(talk(kit, ask))])


@topology(
    "a graph inside of a tool",
    Expect("model", "delegate", step=1),
    *Expect.turns("tools/model", "look", "a door"),
    Expect("model", "it is a door", step=3),
)
def graph_in_tool(kit: Kit) -> Program:
    inner = create_agent(kit.model, [look])

    def delegate() -> Any:
        """Delegate."""
        return (yield inner, kit.ask(LOOK, "a door"))["messages"][-1].text

    yield run_agent(kit, {"call": "delegate"}, "it is a door", tools=[tool(talk(kit, delegate))])


@topology(
    "agents in parallel tool calls",
    Expect("model", "delegate, delegate", step=1),
    *Expect.turns("tools/model", "look", "left"),
    *Expect.turns("tools/model", "weigh", "right"),
    Expect("model", "both", step=3),
    ordered=False,
    remark="their calls interleave",
)
def agents_in_parallel_tools(kit: Kit) -> Program:
    inner = create_agent(kit.model, [look, weigh])
    asks = {"left": kit.ask(LOOK, "left"), "right": kit.ask(WEIGH, "right")}

    def delegate(side: str) -> Any:
        """Delegate."""
        return (yield inner, asks[side])["messages"][-1].text

    both = [{"call": "delegate", "args": {"side": side}} for side in asks]
    yield run_agent(kit, {"calls": both}, "both", tools=[tool(talk(kit, delegate))])


@topology(
    "a supervisor",
    Expect("supervisor/agent", "transfer_to_scout", step=1),
    *Expect.turns("scout/agent", "look", "a door"),
    Expect("supervisor/agent", "it is a door", step=1),
    remark="langgraph-supervisor",
)
def supervisor(kit: Kit) -> Program:
    from langgraph_supervisor import create_supervisor

    scout = create_react_agent(kit.model, [look], name="scout")
    team = create_supervisor([scout], model=kit.model, prompt="Lead.").compile()
    asked = kit.ask({"call": "transfer_to_scout"}, LOOK, "a door", "it is a door")
    yield kit.run(team, asked)


@topology(
    "a swarm",
    Expect("scout/agent", "transfer_to_smith", step=1),
    *Expect.turns("smith/agent", "look", "a door"),
    remark="langgraph-swarm",
)
def swarm(kit: Kit) -> Program:
    from langgraph_swarm import create_handoff_tool, create_swarm

    agents = [
        create_react_agent(
            kit.model, [look, create_handoff_tool(agent_name=other)], name=name, prompt=name
        )
        for name, other in (("scout", "smith"), ("smith", "scout"))
    ]
    team = create_swarm(agents, default_active_agent="scout").compile()
    yield kit.run(team, kit.ask({"call": "transfer_to_smith"}, LOOK, "a door"))


@topology(
    "the functional API",
    Expect("essay/draft", "a draft", step=0),
    Expect("essay/review", "well done", step=0),
    Expect("essay", "the end", step=0),
)
def functional(kit: Kit) -> Program:
    def draft(text: str) -> Any:
        return (yield text).text

    def review(text: str) -> Any:
        return (yield kit.says("well done") + text).text

    drafts, reviews = task(talk(kit, draft)), task(talk(kit, review))

    def essay(text: str) -> Any:
        verdict = yield reviews, (yield drafts, text)
        return (yield kit.says("the end") + verdict).text

    yield kit.run(entrypoint()(talk(kit, essay)), kit.says("a draft"))
