"""Attempts: retried, replaced, given up; calls that were not made at all."""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import count
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langgraph.cache.memory import InMemoryCache
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import CachePolicy

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

NOT_A_STREAM = "a stream falls back or retries only before its first chunk, so these run whole"


def _retried(kit: Kit, failures: int) -> Any:
    graph = StateGraph(Said).add_node("early", chain(kit, "e"))
    shaky = chain(kit, "one", "two", then=Failing(failures))
    graph.add_node("shaky", shaky, retry_policy=RETRY)
    return graph.add_edge(START, "early").add_edge("early", "shaky").compile()


def _attempt(number: int, why: str | None = "superseded_retried") -> list[Expect]:
    return [
        Expect("shaky", says, step=2, task="shaky", attempt=number, why=why)
        for says in ("one", "two")
    ]


@topology(
    "node RetryPolicy: fails once",
    Expect("early", "e", step=1),
    *_attempt(1),
    *_attempt(2, None),
)
def fails_once(kit: Kit) -> Program:
    yield kit.run(_retried(kit, 1), {"said": []})


@topology(
    "node RetryPolicy: fails twice",
    Expect("early", "e", step=1),
    *_attempt(1),
    *_attempt(2),
    *_attempt(3, None),
)
def fails_twice(kit: Kit) -> Program:
    yield kit.run(_retried(kit, 2), {"said": []})


@topology(
    "node RetryPolicy: fails for good",
    Expect("early", "e", step=1),
    *_attempt(1),
    *_attempt(2),
    *_attempt(3, None),
    status="failed",
    raises=ConnectionError,
    remark="the last attempt is what the run came to: if it is scored, it learns",
)
def fails_for_good(kit: Kit) -> Program:
    yield kit.run(_retried(kit, 3), {"said": []})


@topology(
    "RetryPolicy around a chain",
    Expect("work", "one", step=1, task="work", why="superseded_retried"),
    Expect("work", "one", step=1, task="work", attempt=2),
    remark="the node is prompt, model and parser in one runnable",
)
def retried_chain(kit: Kit) -> Program:
    failing = Failing(1)
    chain = RunnableLambda(lambda state: state["messages"]) | kit.model
    node = chain | (lambda reply: {"messages": [failing(reply)]})
    graph = StateGraph(MessagesState).add_node("work", node, retry_policy=RETRY)
    yield kit.run(graph.add_edge(START, "work").compile(), kit.ask("one"))


@topology(
    "RetryPolicy around a subgraph",
    Expect("team/early", "e", step=1, why="superseded_retried"),
    Expect("team/shaky", "s", step=2, why="superseded_retried"),
    Expect("team/early", "e", step=1),
    Expect("team/shaky", "s", step=2),
    remark="attempts are counted by the node around the call, and that is made anew",
)
def subgraph_retried(kit: Kit) -> Program:
    shaky = chain(kit, "s", then=Failing(1))
    team = line(Said, early=chain(kit, "e"), shaky=shaky).compile()
    graph = StateGraph(Said).add_node("team", team, retry_policy=RETRY).add_edge(START, "team")
    yield kit.run(graph.compile(), {"said": []})


def _parsed(kit: Kit, failures: int) -> Runnable[Any, Any]:
    """The model and a parser that fails; each try is told its number."""
    tries, failing = count(1), Failing(failures, ValueError)

    def numbered(messages: Any) -> Any:
        return [*messages, HumanMessage(kit.says(f"try {next(tries)}"))]

    return RunnableLambda(numbered) | kit.model | RunnableLambda(failing)


@topology(
    "with_retry on a chain",
    Expect("answer", "try 1", step=1, task="answer", why="superseded_error"),
    Expect("answer", "try 2", step=1, task="answer"),
)
def chain_retried(kit: Kit) -> Program:
    chained = _parsed(kit, 1).with_retry(wait_exponential_jitter=False)
    yield kit.run(line(MessagesState, answer=kit.node(chained)).compile(), kit.ask())


@topology(
    "with_retry on a model that refuses",
    Expect("answer", "", step=1, task="answer", why="superseded_error"),
    Expect("answer", "fine", step=1, task="answer"),
    remark="a refused request has no tokens: a turn without a reply",
)
def refused(kit: Kit) -> Program:
    asked = iter([kit.chat(temperature=-1), kit.model])
    chained = RunnableLambda(lambda _: next(asked)).with_retry(wait_exponential_jitter=False)
    yield kit.run(line(MessagesState, answer=kit.node(chained)).compile(), kit.ask("fine"))


@topology(
    "with_fallbacks on a model that is not there",
    Expect("answer", "", step=1, task="answer", why="superseded_error"),
    Expect("answer", "fine", step=1, task="answer"),
)
def fallback(kit: Kit) -> Program:
    model = kit.chat("nobody").with_fallbacks([kit.model])
    yield kit.run(line(MessagesState, answer=kit.node(model)).compile(), kit.ask("fine"))


@topology(
    "with_retry on a graph",
    Expect("early", "e", step=1, why="superseded_error"),
    Expect("shaky", "s", step=2, why="superseded_error"),
    *Expect.line(early="e", shaky="s"),
    modes=("invoke", "ainvoke"),
    remark=NOT_A_STREAM,
)
def graph_retried(kit: Kit) -> Program:
    shaky = chain(kit, "s", then=Failing(1))
    graph = line(Said, early=chain(kit, "e"), shaky=shaky).compile()
    yield kit.run(graph.with_retry(wait_exponential_jitter=False), {"said": []})


@topology(
    "with_fallbacks on a graph",
    Expect("shaky", "s", step=1, why="superseded_error"),
    Expect("sure", "s", step=1),
    modes=("invoke", "ainvoke"),
    remark=NOT_A_STREAM,
)
def graph_fallback(kit: Kit) -> Program:
    first = line(Said, shaky=chain(kit, "s", then=Failing(1))).compile()
    second = line(Said, sure=chain(kit, "s")).compile()
    yield kit.run(first.with_fallbacks([second]), {"said": []})


@topology(
    "a failed graph, and another after it",
    Expect("shaky", "s", step=1, why="superseded_error"),
    Expect("sure", "s", step=1),
    remark="the program caught the error and went on, as a fallback would",
)
def by_hand(kit: Kit) -> Program:
    try:
        yield kit.run(line(Said, shaky=chain(kit, "s", then=Failing(1))).compile(), {"said": []})
    except ConnectionError:
        yield kit.run(line(Said, sure=chain(kit, "s")).compile(), {"said": []})


@topology(
    "a chain that fails inside of a node, which goes on",
    Expect("answer", "try 1", step=1, task="answer", why="superseded_error"),
    Expect("answer", "plainly", step=1, task="answer"),
)
def caught(kit: Kit) -> Program:
    parsed = _parsed(kit, 1)

    def instead(messages: Any) -> Any:
        return [HumanMessage(kit.says("plainly"))]

    fallbacks = parsed.with_fallbacks([RunnableLambda(instead) | kit.model])
    yield kit.run(line(MessagesState, answer=kit.node(fallbacks)).compile(), kit.ask())


@topology(
    "a branch that fails beside one that has ended",
    *(
        Expect(branch, f"{branch} {number}", step=1, task=branch)
        for branch in ("left", "right")
        for number in range(2)
    ),
    ordered=False,
    status="failed",
    raises=ConnectionError,
)
def branch_fails(kit: Kit) -> Program:
    meeting = Rendezvous(2)

    def branch(name: str, then: Callable[[], Any]) -> Any:
        def body(state: Any) -> Generator[Any, AIMessage, Any]:
            for number in range(2):
                yield meeting
                yield [HumanMessage(kit.says(f"{name} {number}"))]
            yield meeting  # before the one fails, the other has its replies
            return then()

        return talk(kit, body)

    graph = beside(
        Said, left=branch("left", lambda: {"said": []}), right=branch("right", Failing(1))
    )
    yield kit.run(graph.compile(), {"said": []})


@topology(
    "a node fails after its calls",
    Expect("early", "e", step=1),
    *Expect.turns("shaky", "one", "two", first=2, apart=0, task="shaky"),
    status="failed",
    raises=ValueError,
)
def node_fails(kit: Kit) -> Program:
    shaky = chain(kit, "one", "two", then=Failing(1, ValueError))
    yield kit.run(line(Said, early=chain(kit, "e"), shaky=shaky).compile(), {"said": []})


@topology(
    "the recursion limit is reached",
    *(Expect("think", f"thought {number}", step=number) for number in range(1, 4)),
    status="truncated",
    raises=GraphRecursionError,
)
def recursion(kit: Kit) -> Program:
    graph = StateGraph(MessagesState).add_node("think", kit.node())
    agent = graph.add_edge(START, "think").add_edge("think", "think").compile()
    thoughts = [f"thought {number}" for number in range(1, 9)]
    yield kit.run(agent, kit.ask(*thoughts), {"recursion_limit": 3})


@topology(
    "a node from the cache",
    Expect("costly", "c", step=1),
    Expect("free", "f", step=2, task="first"),
    Expect("free", "f", step=2, task="second"),
    remark="a hit makes no call; the reply that it gives is context to what follows",
)
def cached(kit: Kit) -> Program:
    graph = StateGraph(MessagesState)
    graph.add_node("costly", kit.node(), cache_policy=CachePolicy()).add_node("free", kit.node())
    graph.add_edge(START, "costly").add_edge("costly", "free")
    agent = graph.compile(cache=InMemoryCache())
    state = {"messages": [HumanMessage(kit.says("c", "f"), id="1")]}
    yield kit.run(agent, state)
    yield kit.run(agent, state)
