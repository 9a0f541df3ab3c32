"""Graphs in graphs, in nodes and in tools; the functional API."""

from __future__ import annotations

from functools import partial
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.graph import MessagesState

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
    "memories extracted in a node",
    Expect("chat", "I am Ann", step=1),
    Expect("memorise/extract", "Memory", step=1),
    Expect("answer", "Ann it is", step=3),
    remark="langmem's manager is a graph of its own, whose calls are forced",
)
def extracting(kit: Kit) -> Program:
    from langmem import create_memory_manager

    manager = create_memory_manager(kit.model, enable_updates=False, enable_deletes=False)

    memory = {"call": "Memory", "args": {"content": "Ann likes doors"}}

    def memorise(state: Any) -> Any:
        asked = [state["messages"][-1], HumanMessage(kit.says(memory))]
        found = yield manager, {"messages": asked, "max_steps": 1}
        kept = "; ".join(one.content.content for one in found)
        return {"messages": [HumanMessage(f"{kept} {kit.says('Ann it is')}")]}

    graph = line(MessagesState, chat=kit.node(), memorise=talk(kit, memorise), answer=kit.node())
    yield kit.run(graph.compile(), kit.ask("I am Ann"))
