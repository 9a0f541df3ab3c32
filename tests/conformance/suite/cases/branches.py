"""Branches: parallel, conditional, going in circles, handing over."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal

from langchain_core.messages import AIMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send

from tests.conformance.suite.harness import Expect, Kit, Program, topology
from tests.conformance.suite.nodes import (
    RETRY,
    Failing,
    Rendezvous,
    Said,
    beside,
    chain,
    line,
    talk,
)


def _worker(kit: Kit, fails: int | None = None) -> Any:
    failing = Failing(1)

    def body(state: Any) -> Generator[Any, AIMessage, Any]:
        reply = yield [("user", kit.says(f"part {state['part']}"))]
        if state["part"] == fails:
            failing()
        return {"said": [reply.text]}

    return talk(kit, body)


def _fan_out(state: Any) -> list[Send]:
    return [Send("worker", {"part": part}) for part in range(3)]


@topology(
    "map-reduce with Send",
    *(Expect("worker", f"part {part}", step=1) for part in range(3)),
    Expect("reduce", "part 0 part 1 part 2", step=2),
    ordered=False,
)
def map_reduce(kit: Kit) -> Program:
    def reduce(state: Any) -> Generator[Any, AIMessage, Any]:
        yield [("user", kit.says(" ".join(sorted(state["said"]))))]

    graph = StateGraph(Said).add_node("worker", _worker(kit)).add_node("reduce", talk(kit, reduce))
    graph.add_conditional_edges(START, _fan_out, ["worker"]).add_edge("worker", "reduce")
    yield kit.run(graph.compile(), {"said": []})


@topology(
    "Send, one branch retried",
    *(Expect("worker", f"part {part}", step=1) for part in (0, 2)),
    Expect("worker", "part 1", step=1, task="one", why="superseded_retried"),
    Expect("worker", "part 1", step=1, task="one", attempt=2),
    ordered=False,
)
def send_retried(kit: Kit) -> Program:
    graph = StateGraph(Said).add_node("worker", _worker(kit, fails=1), retry_policy=RETRY)
    graph.add_conditional_edges(START, _fan_out, ["worker"])
    yield kit.run(graph.compile(), {"said": []})


@topology(
    "Send into subgraphs",
    *(Expect("team/draft", f"draft {name}", step=1) for name in "ab"),
    *(Expect("team/check", f"check {name}", step=2) for name in "ab"),
    ordered=False,
)
def send_subgraphs(kit: Kit) -> Program:
    team = line(MessagesState, draft=kit.node(), check=kit.node()).compile()
    graph = StateGraph(MessagesState).add_node("team", team)
    sends = [Send("team", kit.ask(f"draft {name}", f"check {name}")) for name in "ab"]
    graph.add_conditional_edges(START, lambda state: sends, ["team"])
    yield kit.run(graph.compile(), {"messages": []})


@topology(
    "parallel branches that interleave",
    *(
        Expect(branch, f"{branch} {number}", step=1, task=branch)
        for number in range(3)
        for branch in ("left", "right")
    ),
    ordered=False,
    remark="each branch waits for the other before each call",
)
def interleaved(kit: Kit) -> Program:
    meeting = Rendezvous(2)
    branches = {
        name: chain(kit, *(f"{name} {number}" for number in range(3)), meeting=meeting)
        for name in ("left", "right")
    }
    yield kit.run(beside(Said, **branches).compile(), {"said": []})


@topology(
    "parallel branches, one prompt",
    *(Expect(branch, "same", step=1) for branch in ("left", "right")),
    ordered=False,
    remark="both were shown the same tokens and said the same: two samples, both trained",
)
def one_prompt(kit: Kit) -> Program:
    nodes = {name: chain(kit, "same") for name in ("left", "right")}
    yield kit.run(beside(Said, **nodes).compile(), {"said": []})


@topology(
    "a deferred node",
    Expect("short", "s", step=1),
    *Expect.line(long="l 0", longer="l 1", last="end"),
    ordered=False,
)
def deferred(kit: Kit) -> Program:
    graph = beside(Said, short=chain(kit, "s"), long=chain(kit, "l 0"))
    graph.add_node("longer", chain(kit, "l 1")).add_edge("long", "longer")
    graph.add_node("last", chain(kit, "end"), defer=True)
    graph.add_edge("short", "last").add_edge("longer", "last")
    yield kit.run(graph.compile(), {"said": []})


@topology(
    "conditional edges and a cycle",
    *Expect.turns("think", "more", "even more", "enough", apart=1),
    Expect("answer", "yes", step=4),
)
def cycle(kit: Kit) -> Program:
    def onward(state: Any) -> Literal["think", "answer"]:
        return "think" if "more" in state["messages"][-1].text else "answer"

    graph = StateGraph(MessagesState).add_node("think", kit.node()).add_node("answer", kit.node())
    graph.add_edge(START, "think").add_conditional_edges("think", onward)
    yield kit.run(graph.compile(), kit.ask("more", "even more", "enough", "yes"))


@topology(
    "Command(goto) in a circle",
    *Expect.line(write="one", criticise="again"),
    Expect("write", "two", step=3),
    Expect("criticise", "good", step=4),
)
def goto(kit: Kit) -> Program:
    def criticise(state: Any) -> Generator[Any, AIMessage, Any]:
        reply = yield state["messages"]
        return Command(goto=END if reply.text == "good" else "write", update={"messages": [reply]})

    graph = StateGraph(MessagesState).add_node("write", kit.node())
    graph.add_node("criticise", talk(kit, criticise), destinations=("write", END))
    graph.add_edge(START, "write").add_edge("write", "criticise")
    yield kit.run(graph.compile(), kit.ask("one", "again", "two", "good"))


@topology(
    "handing over to the parent graph",
    Expect("desk/greet", "hello", step=1),
    Expect("desk/hand", "wait", step=2),
    Expect("expert", "solved", step=2),
)
def parent_handoff(kit: Kit) -> Program:
    def hand(state: Any) -> Generator[Any, AIMessage, Any]:
        reply = yield state["messages"]
        update = {"messages": [*state["messages"], reply]}
        return Command(goto="expert", graph=Command.PARENT, update=update)

    desk = line(MessagesState, greet=kit.node(), hand=talk(kit, hand)).compile()
    graph = StateGraph(MessagesState).add_node("desk", desk).add_node("expert", kit.node())
    graph.add_edge(START, "desk")
    yield kit.run(graph.compile(), kit.ask("hello", "wait", "solved"))
