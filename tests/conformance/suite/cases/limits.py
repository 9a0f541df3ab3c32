"""What LangGraph does to a node that fails, hangs or loops, and to a graph that is to stop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphDrained, GraphRecursionError, NodeError, NodeTimeoutError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import RunControl, Runtime
from langgraph.types import CachePolicy, Command, RetryPolicy, TimeoutPolicy

from tests.conformance.suite.cases.interrupts import careful
from tests.conformance.suite.harness import Expect, Kit, Program, topology
from tests.conformance.suite.nodes import RETRY, Failing, Said, chain, line, talk
from tests.conformance.suite.outcomes import leaves, same
from tests.conformance.suite.tools import run_agent

ASYNC = "LangGraph's time limits are for asynchronous nodes"
HANDLER = "shaky/__error_handler__shaky"


def _go_on(reply: Any = None) -> Any:
    """LangGraph does not follow the edges of a node that has failed."""
    return Command(update={"said": ["mended"]}, goto="late")


def _handler(kit: Kit, *replies: str, then: Any = None) -> Any:
    """An error handler that asks the model."""
    asks = chain(kit, *replies, then=then)

    def handler(state: Said, error: NodeError) -> Any:
        same("the node that failed", error.node, "shaky")
        return (yield asks, state)

    return talk(kit, handler)


def _handled(kit: Kit, handler: Any, failures: int = 1, **options: Any) -> Any:
    shaky = chain(kit, "one", then=Failing(failures))
    graph = StateGraph(Said).add_node("shaky", shaky, error_handler=handler, **options)
    graph.add_node("late", chain(kit, "late"))
    return graph.add_edge(START, "shaky").add_edge("shaky", "late")


@topology(
    "an error handler",
    Expect("shaky", "one", step=1, why="superseded_error"),
    Expect(HANDLER, "mended", step=1),
    Expect("late", "late", step=2),
    remark="`add_node(error_handler=…)`",
)
def error_handler(kit: Kit) -> Program:
    yield kit.run(_handled(kit, _handler(kit, "mended", then=_go_on)).compile(), {"said": []})


@topology(
    "an error handler, after all attempts",
    Expect("shaky", "one", step=1, task="shaky", why="superseded_retried"),
    Expect("shaky", "one", step=1, task="shaky", attempt=2, why="superseded_retried"),
    Expect("shaky", "one", step=1, task="shaky", attempt=3, why="superseded_error"),
    Expect(HANDLER, "mended", step=1),
    Expect("late", "late", step=2),
)
def error_handler_retried(kit: Kit) -> Program:
    graph = _handled(kit, _handler(kit, "mended", then=_go_on), failures=3, retry_policy=RETRY)
    yield kit.run(graph.compile(), {"said": []})


@topology(
    "an error handler, and a failure after it",
    Expect("shaky", "one", step=1, why="superseded_error"),
    Expect(HANDLER, "mended", step=1),
    Expect("late", "late", step=2),
    status="failed",
    raises=ValueError,
)
def error_handler_then_failure(kit: Kit) -> Program:
    graph = StateGraph(Said)
    shaky = chain(kit, "one", then=Failing(1))
    graph.add_node("shaky", shaky, error_handler=_handler(kit, "mended", then=_go_on))
    graph.add_node("late", chain(kit, "late", then=Failing(1, ValueError)))
    graph.add_edge(START, "shaky").add_edge("shaky", "late")
    yield kit.run(graph.compile(), {"said": []})


@topology(
    "an error handler that fails, too",
    Expect("shaky", "one", step=1),
    Expect(HANDLER, "mended", step=1),
    status="failed",
    raises=ConnectionError,
    remark="nothing mended it: if the run is scored, all of it learns",
)
def error_handler_fails(kit: Kit) -> Program:
    graph = _handled(kit, _handler(kit, "mended", then=Failing(1)))
    yield kit.run(graph.compile(), {"said": []})


@topology(
    "an error handler of a subgraph",
    Expect("shaky/early", "e", step=1, why="superseded_error"),
    Expect("shaky/inner", "i", step=2, why="superseded_error"),
    Expect(HANDLER, "mended", step=1),
)
def error_handler_subgraph(kit: Kit) -> Program:
    inner = chain(kit, "i", then=Failing(1))
    team = line(Said, early=chain(kit, "e"), inner=inner).compile()
    graph = StateGraph(Said).add_node("shaky", team, error_handler=_handler(kit, "mended"))
    yield kit.run(graph.add_edge(START, "shaky").compile(), {"said": []})


@topology(
    "a default error handler",
    Expect("shaky", "one", step=1, why="superseded_error"),
    Expect("shaky/__default_error_handler__", "mended", step=1),
    remark="`set_node_defaults(error_handler=…)`",
)
def default_error_handler(kit: Kit) -> Program:
    graph = StateGraph(Said).set_node_defaults(error_handler=_handler(kit, "mended"))
    graph.add_node("shaky", chain(kit, "one", then=Failing(1))).add_edge(START, "shaky")
    yield kit.run(graph.compile(), {"said": []})


@topology(
    "a cached node with an error handler",
    Expect("shaky", "one", step=1, why="superseded_error"),
    Expect(HANDLER, "mended", step=1),
    Expect("late", "late", step=2, task="late 1"),
    Expect("shaky", "one", step=1),
    Expect("late", "late", step=2, task="late 2"),
    Expect("late", "late", step=2, task="late 3"),
    remark="a failure is not cached; the third run takes the second's reply from the cache",
)
def error_handler_cached(kit: Kit) -> Program:
    graph = _handled(kit, _handler(kit, "mended", then=_go_on), cache_policy=CachePolicy())
    agent = graph.compile(cache=InMemoryCache())
    for _ in range(3):
        yield kit.run(agent, {"said": []})


@topology(
    "a node out of time",
    Expect("slow", "one", step=1, task="slow", why="superseded_retried"),
    Expect("slow", "two", step=1, task="slow", attempt=2),
    modes=("ainvoke", "astream"),
    remark=ASYNC,
)
def out_of_time(kit: Kit) -> Program:
    words = iter(["one", "two"])

    async def slow(state: Any) -> Any:
        word = next(words)
        reply = await kit.model.ainvoke(kit.says(word))
        if word == "one":
            loop = asyncio.get_running_loop()
            loop.time = lambda: time.monotonic() + 600  # the limit is over
            await asyncio.sleep(600)
        return {"messages": [reply]}

    again = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=NodeTimeoutError)
    graph = StateGraph(MessagesState).add_node("slow", slow, timeout=60, retry_policy=again)
    yield kit.run(graph.add_edge(START, "slow").compile(), kit.ask())


@topology(
    "a node that says it is alive",
    *Expect.turns("slow", "one", "two", apart=0, task="slow"),
    modes=("ainvoke", "astream"),
    remark="`TimeoutPolicy(refresh_on=…)` by heartbeats and by calls",
)
def heartbeat(kit: Kit) -> Program:
    async def slow(state: Any, runtime: Runtime) -> Any:
        await kit.model.ainvoke(kit.says("one"))
        for _ in range(3):
            runtime.heartbeat()
            await asyncio.sleep(0.01)
        return {"messages": [await kit.model.ainvoke(kit.says("two"))]}

    for_beats = TimeoutPolicy(idle_timeout=30, refresh_on="heartbeat")
    graph = StateGraph(MessagesState).add_node("slow", slow, timeout=for_beats)
    yield kit.run(graph.add_edge(START, "slow").compile(), kit.ask())


@topology(
    "a node whose calls keep it alive",
    Expect("slow", "one", step=1, task="slow"),
    modes=("ainvoke", "astream"),
    remark="`TimeoutPolicy(idle_timeout=…)`, which listens to LangChain's callbacks",
)
def alive(kit: Kit) -> Program:
    graph = StateGraph(MessagesState)
    graph.add_node("slow", kit.node(), timeout=TimeoutPolicy(idle_timeout=30))
    yield kit.run(graph.add_edge(START, "slow").compile(), kit.ask("one"))


def _drained(kit: Kit, control: RunControl) -> Any:
    def stops(reply: Any = None) -> None:
        control.request_drain()

    graph = line(Said, early=chain(kit, "e", then=stops), late=chain(kit, "l"))
    return graph.compile(checkpointer=InMemorySaver())


@topology(
    "drained",
    Expect("early", "e", step=1),
    status="interrupted",
    raises=GraphDrained,
    threaded=True,
    remark="`RunControl.request_drain`: the graph stops between two steps, and may be gone on with",
)
def drained(kit: Kit) -> Program:
    control = RunControl()
    yield kit.run(_drained(kit, control), {"said": []}, control=control)


@topology("drained, and gone on with", *Expect.line(early="e", late="l"), threaded=True)
def drained_and_resumed(kit: Kit) -> Program:
    control = RunControl()
    agent = _drained(kit, control)
    with leaves(GraphDrained):
        yield kit.run(agent, {"said": []}, control=control)
    yield kit.run(agent, None)


@topology(
    "checkpoints written at a graph's end alone",
    Expect("early", "e", step=1),
    Expect("careful", "sure? 1", step=2, task="careful", why="superseded_interrupted"),
    Expect("careful", "sure? 2", step=2, task="careful"),
    threaded=True,
    remark='`durability="exit"`',
)
def durable_at_exit(kit: Kit) -> Program:
    graph = line(MessagesState, early=kit.node(), careful=careful(kit, "sure?"))
    agent = graph.compile(checkpointer=InMemorySaver())
    yield kit.run(agent, kit.ask("e"), durability="exit")
    yield kit.run(agent, Command(resume="yes"), durability="exit")


@topology(
    "a sub-agent that loops inside of a tool",
    Expect("model", "delve", step=1),
    *Expect.turns("tools/think", "hm", "hm", apart=1),
    Expect("model", "so be it", step=3),
    remark="the tool catches the recursion limit: to loop is what the policy did, so it counts",
)
def loops(kit: Kit) -> Program:
    thinks = StateGraph(MessagesState).add_node("think", kit.node())
    sub = thinks.add_edge(START, "think").add_edge("think", "think").compile()
    given: Any = {"messages": [HumanMessage(kit.says("hm", "hm", "hm"))]}
    limited = sub.with_config(recursion_limit=2)

    def delve() -> Any:
        """Delve."""
        try:
            return (yield limited, given)["messages"][-1].text
        except GraphRecursionError:
            return "It was too much."

    yield run_agent(kit, {"call": "delve", "args": {}}, "so be it", tools=[tool(talk(kit, delve))])


@topology(
    "a sub-agent that loops, and another in its place",
    *Expect.turns("answer/think", "hm", "hm", apart=1, why="superseded_error"),
    Expect("answer", "fine", step=1),
    modes=("invoke", "ainvoke"),
    remark="`with_fallbacks`: what it did was thrown away as a whole",
)
def loops_replaced(kit: Kit) -> Program:
    thinks = StateGraph(MessagesState).add_node("think", kit.node())
    sub = thinks.add_edge(START, "think").add_edge("think", "think").compile()
    limit: Any = {"recursion_limit": 2}
    limited = RunnableLambda(
        lambda state: sub.invoke(state, limit), lambda state: sub.ainvoke(state, limit)
    )
    asked = RunnableLambda(lambda state: kit.says("fine"))
    other = asked | kit.model | (lambda reply: {"messages": [reply]})
    graph = StateGraph(MessagesState).add_node("answer", limited.with_fallbacks([other]))
    yield kit.run(graph.add_edge(START, "answer").compile(), kit.ask("hm", "hm", "hm"))
