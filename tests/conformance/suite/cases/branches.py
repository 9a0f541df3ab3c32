"""Branches: parallel, sent, handed over to."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send

from tests.conformance.suite.harness import Expect, Kit, Program, in_two_modes, topology
from tests.conformance.suite.nodes import (
    RETRY,
    Failing,
    Said,
    chain,
    line,
    talk,
)


@topology(
    "map-reduce with Send, one branch retried",
    *(Expect("worker", f"part {part}", step=1) for part in (0, 2)),
    Expect("worker", "part 1", step=1, task="one", why="superseded_retried"),
    Expect("worker", "part 1", step=1, task="one", attempt=2),
    Expect("reduce", "part 0 part 1 part 2", step=2),
    ordered=False,
)
def send_retried(kit: Kit) -> Program:
    failing = Failing(1)

    def worker(state: Any) -> Generator[Any, AIMessage, Any]:
        reply = yield [("user", kit.says(f"part {state['part']}"))]
        return {"said": [reply.text if state["part"] != 1 else failing(reply.text)]}

    def reduce(state: Any) -> Generator[Any, AIMessage, Any]:
        yield [("user", kit.says(" ".join(sorted(state["said"]))))]

    graph = StateGraph(Said).add_node("worker", talk(kit, worker), retry_policy=RETRY)
    sends = [Send("worker", {"part": part}) for part in range(3)]
    graph.add_conditional_edges(START, lambda state: sends, ["worker"])
    graph.add_node("reduce", talk(kit, reduce)).add_edge("worker", "reduce")
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
