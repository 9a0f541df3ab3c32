"""Nodes that call the model several times, written once for synchronous and asynchronous runs."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Callable, Generator
from typing import Annotated, Any, TypeAlias, TypedDict

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import Runnable
from langgraph.graph import START, StateGraph
from langgraph.types import RetryPolicy

from tests.conformance.suite.harness import Kit

Body: TypeAlias = "Callable[[Any], Generator[Any, AIMessage, Any]]"
"""Takes the state, yields prompts, is sent each reply, returns the update.

It may also yield a pair of another runnable and its prompt, or a `Rendezvous`.
"""

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


def talk(kit: Kit, body: Body, model: Runnable[Any, Any] | None = None) -> Any:
    """A node out of a generator."""
    asked = model or kit.model

    def node(state: Any) -> Any:
        steps = body(state)
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(step, Rendezvous):
                step.threads.wait()
            else:
                runnable, prompt = step if isinstance(step, tuple) else (asked, step)
                answer = runnable.invoke(prompt)

    async def anode(state: Any) -> Any:
        steps = body(state)
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(step, Rendezvous):
                await step.tasks.wait()
            else:
                runnable, prompt = step if isinstance(step, tuple) else (asked, step)
                answer = await runnable.ainvoke(prompt)

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
