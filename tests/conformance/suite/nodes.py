"""Nodes that call the model, written once for synchronous and asynchronous runs.

They are generators: of the state (or what a hook or tool is given), which yield prompts, are sent
each reply, and return the update. They may also yield a pair of another runnable, or of a hook's
handler or a task of the functional API, and what it is given, or a `Rendezvous`.
"""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import wraps
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import Runnable
from langgraph.graph import START, StateGraph
from langgraph.types import RetryPolicy

from tests.conformance.suite.harness import Kit, without_loop

RETRY = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=ConnectionError)
"""Two further attempts."""


class Said(TypedDict):
    """A state for branches: what they said, in no order."""

    said: Annotated[list[str], operator.add]


class Rendezvous:
    """A place where parallel branches wait for one another, so that their calls interleave."""

    def __init__(self, branches: int) -> None:
        self.threads = threading.Barrier(branches, timeout=30)
        self.tasks = asyncio.Barrier(branches)


def talk(kit: Kit, body: Callable[..., Any], model: Runnable[Any, Any] | None = None) -> Any:
    """A node, hook or tool out of a generator; the errors of what it asks are raised in it."""
    asked = model or kit.model

    def begin(step: Any) -> Any:
        if isinstance(step, Rendezvous):
            return step.tasks.wait() if kit.asynchronous else step.threads.wait()
        what, given = step if isinstance(step, tuple) else (asked, step)
        if not hasattr(what, "invoke"):
            told = what(given)
            is_task = isinstance(told, Future) and not kit.asynchronous
            return told.result() if is_task else told
        return what.ainvoke(given) if kit.asynchronous else what.invoke(given)

    async def played(steps: Generator[Any, Any, Any]) -> Any:
        """What the generator returns. Awaits nothing in synchronous programs."""
        proceed, value = steps.send, None
        while True:
            try:
                step = proceed(value)
            except StopIteration as end:
                return end.value
            try:
                answer = begin(step)
                proceed, value = steps.send, await answer if kit.asynchronous else answer
            except Exception as error:  # noqa: BLE001 - the generator may expect it
                proceed, value = steps.throw, error

    @wraps(body)
    def node(*given: Any, **named: Any) -> Any:
        return without_loop(played(body(*given, **named)))

    @wraps(body)
    async def anode(*given: Any, **named: Any) -> Any:
        return await played(body(*given, **named))

    return anode if kit.asynchronous else node


def chain(
    kit: Kit,
    *replies: str,
    meeting: Rendezvous | None = None,
    then: Callable[[Any], Any] | None = None,
) -> Any:
    """A node that asks and asks again in one conversation; it gets `replies`, then calls `then`."""

    def body(state: Any) -> Generator[Any, AIMessage, Any]:
        prompt: list[Any] = [HumanMessage(kit.says(*replies))]
        reply = AIMessage("")
        for number in range(len(replies)):
            if number:
                prompt = [*prompt, reply, HumanMessage("Go on.")]
            if meeting is not None:
                yield meeting
            reply = yield prompt
        update = then(state) if then else None
        return update if update is not None else {"said": [reply.text]}

    return talk(kit, body)


class Failing:
    """Raises the first `times` times that it is called."""

    def __init__(self, times: int, error: type[Exception] = ConnectionError) -> None:
        self._left, self._error = times, error

    def __call__(self, value: Any = None) -> Any:
        """Gives the value back, once it has failed often enough."""
        if self._left > 0:
            self._left -= 1
            raise self._error("not now")
        return value


def line(state: type[Any], **nodes: Any) -> StateGraph[Any]:
    """A graph whose nodes run one after the other."""
    return StateGraph(state).add_sequence(list(nodes.items())).add_edge(START, next(iter(nodes)))


def beside(state: type[Any], **nodes: Any) -> StateGraph[Any]:
    """A graph whose nodes run in parallel."""
    graph = StateGraph(state)
    for name, node in nodes.items():
        graph.add_node(name, node).add_edge(START, name)
    return graph
