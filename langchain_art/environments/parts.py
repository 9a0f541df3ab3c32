"""Parts that the adapters share: an environment for a fit, and a graph's conversation with it."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage

from langchain_art.errors import ConfigError
from langchain_art.rollout.graph_rollout import Graph
from langchain_art.tracing.run import Run

Scenario = dict[str, Any]


@dataclass(frozen=True)
class Environment:
    """An environment for `Trainer.fit`, or for `gather`: a rollout, and what to play.

    Workers import a rollout by its name: assign ``rollout = env.rollout`` in a module.
    """

    rollout: Callable[[Scenario], Awaitable[Run]]
    """Plays a scenario with the graph; the run's reward is the environment's."""
    train: list[Scenario]
    held_out: list[Scenario]


def divided(
    rollout: Callable[[Scenario], Awaitable[Run]], scenarios: Sequence[Scenario], held_out: int
) -> Environment:
    """An `Environment` of scenarios; which of them are held out, their ids decide.

    Raises:
        ConfigError: none would be left to train on, or two have one id.
    """
    order = sorted(scenarios, key=lambda one: hashlib.sha256(one["id"].encode()).digest())
    apart = {one["id"] for one in order[:held_out]}
    if not 0 <= held_out < len({one["id"] for one in scenarios}) == len(scenarios):
        raise ConfigError(
            f"got {held_out=} of {len(scenarios)} scenarios, expected fewer of them held out, and "
            "an id of its own for each"
        )
    train = [one for one in scenarios if one["id"] not in apart]
    return Environment(rollout, train, [one for one in scenarios if one["id"] in apart])


@contextmanager
def installed(extra: str) -> Generator[None, None, None]:
    """Raises ConfigError, which says how to install it, if a library is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'{error}, which this needs; run: pip install "langchain-art[{extra}]"'
        ) from error


class Conversation:
    """A graph that answers what an environment says, with all messages before; one a run."""

    def __init__(self, graph: Graph, run: Run) -> None:
        self.messages: list[BaseMessage] = []
        self.failure: Exception | None = None
        """Error that the graph raised; a library around it may keep only its text."""
        self._graph = graph
        self._thread = run.id  # which a graph with a checkpointer needs

    async def answer(self, *said: str | BaseMessage, **configurable: Any) -> str:
        """The text of the graph's last message. Raises ConfigError if its state has no messages."""
        given = [HumanMessage(one) if isinstance(one, str) else one for one in said]
        config = {"configurable": {"thread_id": self._thread, **configurable}}
        try:
            state = await self._graph.ainvoke({"messages": [*self.messages, *given]}, config)
        except Exception as error:
            self.failure = error
            raise
        if not (isinstance(state, dict) and state.get("messages")):
            raise ConfigError(f"got the state {state!r:.200} of a graph, expected `messages` in it")
        self.messages = list(state["messages"])
        return str(self.messages[-1].text)
