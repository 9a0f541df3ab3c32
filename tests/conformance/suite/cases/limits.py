"""What LangGraph does to a node that fails, hangs or loops, and to a graph that is to stop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphDrained, GraphRecursionError, NodeError, NodeTimeoutError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import RunControl
from langgraph.types import Command, RetryPolicy

from tests.conformance.suite.harness import Expect, Kit, Program, same, topology
from tests.conformance.suite.nodes import RETRY, Failing, Said, chain, line, talk
from tests.conformance.suite.tools import run_agent

HANDLER = "shaky/__error_handler__shaky"


def _handler(kit: Kit, then: Any = None) -> Any:
    asks = chain(kit, "mended", then=then)

    def handler(state: Said, error: NodeError) -> Any:
        same("the node that failed", error.node, "shaky")
        return (yield asks, state)

    return talk(kit, handler)


@topology(
    "an error handler that fails, too",
    Expect("shaky", "one", step=1),
    Expect(HANDLER, "mended", step=1),
    status="failed",
    raises=ConnectionError,
    remark="nothing mended it: if the run is scored, all of it learns",
)
def error_handler_fails(kit: Kit) -> Program:
    shaky, handler = chain(kit, "one", then=Failing(1)), _handler(kit, then=Failing(1))
    graph = StateGraph(Said).add_node("shaky", shaky, error_handler=handler)
    yield kit.run(graph.add_edge(START, "shaky").compile(), {"said": []})


@topology(
    "an error handler of a subgraph",
    Expect("shaky/early", "e", step=1, why="superseded_error"),
    Expect("shaky/inner", "i", step=2, why="superseded_error"),
    Expect(HANDLER, "mended", step=1),
)
def error_handler_subgraph(kit: Kit) -> Program:
    inner = chain(kit, "i", then=Failing(1))
    team = line(Said, early=chain(kit, "e"), inner=inner).compile()
    graph = StateGraph(Said).add_node("shaky", team, error_handler=_handler(kit))
    yield kit.run(graph.add_edge(START, "shaky").compile(), {"said": []})


@topology(
    "a default error handler, after all attempts",
    *(Expect("shaky", "one", 1, None, "shaky", n, "superseded_retried") for n in (1, 2)),
    Expect("shaky", "one", step=1, task="shaky", attempt=3, why="superseded_error"),
    Expect("shaky/__default_error_handler__", "mended", step=1),
    Expect("late", "late", step=2),
    remark="`set_node_defaults(error_handler=…)`",
)
def default_error_handler(kit: Kit) -> Program:
    # LangGraph does not follow the edges of a node that has failed.
    goes_on = Command(update={"said": ["mended"]}, goto="late")
    handler = _handler(kit, then=lambda state: goes_on)
    graph = StateGraph(Said).set_node_defaults(error_handler=handler)
    graph.add_node("shaky", chain(kit, "one", then=Failing(3)), retry_policy=RETRY)
    graph.add_node("late", chain(kit, "late")).add_edge(START, "shaky")
    yield kit.run(graph.compile(), {"said": []})


@topology(
    "a node out of time",
    Expect("slow", "one", step=1, task="slow", why="superseded_retried"),
    Expect("slow", "two", step=1, task="slow", attempt=2),
    modes=("ainvoke", "astream"),
    remark="LangGraph's time limits are for asynchronous nodes",
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
    "drained",
    Expect("early", "e", step=1),
    status="interrupted",
    raises=GraphDrained,
    threaded=True,
    remark="`RunControl.request_drain`: the graph stops between two steps, and may be gone on with",
)
def drained(kit: Kit) -> Program:
    control = RunControl()
    early = chain(kit, "e", then=lambda state: control.request_drain())
    graph = line(Said, early=early, late=chain(kit, "l")).compile(checkpointer=InMemorySaver())
    yield kit.run(graph, {"said": []}, control=control)


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
