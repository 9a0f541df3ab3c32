"""`Run`, what `capture()` yields: one graph run, its status and its rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any
from uuid import uuid4

from langchain_core.messages import AIMessage
from langgraph.errors import GraphRecursionError
from pydantic import ValidationError

from langchain_art._notebook import view_html
from langchain_art.call_seeds import run_seed
from langchain_art.errors import ConfigError
from langchain_art.tracing.message_log import jsonable
from langchain_art.tracing.recorder import RunRecorder
from langchain_art.tracing.spans import is_pause
from langchain_art.wire import NOT_HEARD, CallTags, Status, Trajectory, Turn
from langchain_art.wire.identifiers import MAX_REWARD, scenario_id, scenario_name


class Run:
    """One graph run, recorded while it happens; `capture()` yields it.

    Set `reward`, `scores` and `metadata`, and rewards of single calls with `reward_turn` and
    `reward_node`; `input`, `output`, `status` and `error` are recorded, and may be overwritten.
    Arguments and errors are those of `capture`.

    Example::

        with capture(scenario="q-7") as run:
            answer = graph.invoke({"messages": [("user", "When did Ann write?")]})
            run.reward = float("Monday" in answer["messages"][-1].text)
        run.trajectory().turns[0].node   # "model"
    """

    def __init__(
        self,
        *,
        scenario: Any = None,
        id: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        try:
            named = scenario_name if isinstance(scenario, str) else scenario_id
            known = None if scenario is None else named(scenario)
            tags = CallTags(trajectory_id=id or uuid4().hex, scenario=known)
        except ValidationError as error:
            why = "; ".join(f"`{e['loc'][0]}`: {e['msg']}" for e in error.errors())
            raise ConfigError(f"a run cannot be named so: {why}") from error
        self.id: str = tags.trajectory_id or ""
        self.scenario = known
        self.scores: dict[str, float] = {}
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.input: Any = None
        self.output: Any = None
        self.status: Status = "completed"
        self.error: str | None = None
        self._reward: float | None = None
        self._turn_rewards: dict[str, float | None] = {}
        self.recorder = RunRecorder()
        seed = run_seed.get()
        self.rng: Random = Random() if seed is None else seed.rng
        """Random numbers for what the program draws itself; in a fit they descend from its seed."""

    @property
    def reward(self) -> float | None:
        """The run's reward; None (default) means not scored, which is not zero."""
        return self._reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        self._reward = _checked(value)

    def reward_turn(self, turn: AIMessage | Turn | str, value: float | None) -> None:
        """Score one model call, in addition to the run.

        The effect depends on `TrainConfig.credit` (credit assignment): ``run`` adds it to the run's
        reward, ``node`` compares it with those of the same node in the group's other runs, ``turn``
        gives it to this call and to those before it.

        Args:
            turn: the model's reply, one of `turns`, or the call's id.
            value: its reward; None removes it.

        Raises:
            ConfigError: this run has no such call, or `value` is not finite.

        Example::

            state = graph.invoke({"messages": [("user", question)]})
            for message in state["messages"]:
                if isinstance(message, AIMessage):
                    run.reward_turn(message, 0.0 if message.invalid_tool_calls else 0.1)
        """
        if isinstance(turn, AIMessage):
            metadata = turn.response_metadata
            given: Any = metadata.get("call_id") or metadata.get("id") or turn.id
            call_id = None if given is None else str(given)
        else:
            call_id = turn.call_id if isinstance(turn, Turn) else turn
        known = [one.call_id for one in self.recorder.turns()]
        if call_id is None or call_id not in known:
            got = f"the call {call_id!r}" if call_id else f"{turn!r:.80}, which names no call"
            raise ConfigError(
                f"got a reward for {got}, expected the id or the reply of one of the "
                f"{len(known)} calls of this run (`run.turns`), not a message made by hand"
            )
        self._turn_rewards[call_id] = _checked(value)

    def reward_node(self, node: str, value: float | None) -> None:
        """Score the latest call of a node that counts; see `reward_turn`.

        Args:
            node: its name, or its path (``team/writer``).
            value: its reward; None removes it.

        Raises:
            ConfigError: the node made no call that counts, or `value` is not finite.

        Example::

            run.reward_node("writer", 1.0)
            run.reward_node("critic", 0.0)
        """
        turns = [
            turn for turn in self.recorder.turns() if turn.call_id and not turn.excluded_because
        ]
        own = [turn for turn in turns if node in (turn.node, "/".join(turn.path))]
        if not own:
            nodes = sorted({"/".join(turn.path) or turn.node or "-" for turn in turns})
            raise ConfigError(
                f"got a reward for the node {node!r}, expected one that has called a model in this "
                f"run: {nodes}"
            )
        self.reward_turn(own[-1], value)

    @property
    def turns(self) -> list[Turn]:
        """The calls so far, in the order in which they started."""
        given = self._turn_rewards
        return [
            turn.model_copy(update={"reward": given[turn.call_id]})
            if turn.call_id in given
            else turn
            for turn in self.recorder.turns()
        ]

    def trajectory(self) -> Trajectory:
        """A frozen snapshot of the run as it stands now.

        If prompts or the output hold replies of our server that were not sampled in this run (a
        cached node, an earlier run of the thread, a raw thread without a handler), its metadata
        names their calls: ``sampled_elsewhere``. If it has no call, or one whose model reported no
        id, its metadata says so: ``not_heard``, a list of sentences.

        Raises:
            ValidationError: a score is not finite, or the run has more than 4096 turns.
        """
        metadata = self.metadata
        if elsewhere := self.recorder.sampled_elsewhere(self.output):
            metadata = {**metadata, "sampled_elsewhere": elsewhere}
        turns = tuple(self.turns)
        if self.status != "failed" and (missed := _not_recorded(turns)):
            metadata = {**metadata, NOT_HEARD: missed}
        return Trajectory(
            id=self.id,
            scenario=self.scenario,
            turns=turns,
            input=jsonable(self.input),
            output=jsonable(self.output),
            reward=self.reward,
            scores=dict(self.scores),
            metadata=jsonable(metadata),
            status=self.status,
            error=self.error,
        )

    def __repr__(self) -> str:
        scored = "not scored" if self.reward is None else f"reward {self.reward:g}"
        return f"<Run {self.id} of {self.scenario!r}: {self.status}, {scored}>"

    def _repr_html_(self) -> str:
        return view_html("cli.tables:run_view", self.trajectory())

    def complete(self) -> None:
        """Record that a graph of the run ended without an error."""
        outcome = self.recorder.spans.outcome()
        if outcome == "error":
            return  # a graph beside it failed
        if self.status in ("failed", "truncated"):  # an earlier graph, and the run continued
            self.error = None
        self.status = "interrupted" if outcome == "interrupted" else "completed"

    def fail(self, error: BaseException) -> None:
        """Record that the run ended with `error`."""
        self.status = "failed"
        if isinstance(error, GraphRecursionError):
            self.status = "truncated"
        elif is_pause(error):
            self.status = "interrupted"
        self.error = f"{type(error).__name__}: {error}"


#: What to do about a scope that recorded no call.
NO_CALLS = (
    "no model call was recorded: calls of a RemoteGraph, of other processes (process pools) and of "
    "threads without this context do not reach capture(). Name the trajectory in the config's "
    "metadata (`art_trajectory_id`), or give the model a CaptureHandler"
)


def _not_recorded(turns: Sequence[Turn]) -> list[str]:
    if not turns:
        return [NO_CALLS]
    nameless = Counter(turn.model for turn in turns if turn.reply and not turn.call_id)
    return [
        f"{calls} of the calls of the model {model!r} reported no id: if the server sampled them, "
        "they cannot be found and are not trained"
        for model, calls in nameless.items()
    ]


def _checked(value: float | None) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= MAX_REWARD:  # nor if it is NaN
        raise ConfigError(
            f"got a reward of {value!r:.80}, expected a finite number within ±{MAX_REWARD:g}; "
            "leave it None if there is no score"
        )
    return number
