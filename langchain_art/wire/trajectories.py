"""A trajectory (one run of a graph) with its model calls, a group of them, and a reward for one.

A reward is finite or refused, and ``None`` (not scored) is not ``0.0``. Token ids and logprobs are
not here: the server keeps them under a completion's id (`Turn.call_id`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from langchain_art._notebook import view_html
from langchain_art.wire.identifiers import (
    Finite,
    Id,
    Message,
    RewardValue,
    ScenarioName,
    Several,
    Tag,
    Wire,
    as_json,
    escaped,
    unwritable,
)


class CallTags(Wire):
    """A caller's tags of a model call: ``extra_body={"art": {...}}`` or ``x-art-*`` headers."""

    trajectory_id: Id | None = None
    scenario: ScenarioName | None = None
    node: str | None = Field(default=None, max_length=256)
    path: Several[str] = Field(default=(), max_length=64)
    namespace: str | None = Field(default=None, max_length=2048)
    """LangGraph's checkpoint namespace: tells parallel branches of one node apart."""
    step: int | None = None
    attempt: int = Field(default=1, ge=1)
    task_began: Finite | None = None
    """Start of the first attempt of the node, in seconds since the epoch: a node that runs again
    after an interrupt begins again."""
    thread: str | None = Field(default=None, max_length=256)
    tags: Several[Tag] = Field(default=(), max_length=32)
    """The caller's own (LangChain's ``tags``); `TrainRequest.trainable` may name them."""

    def of_turn(self) -> dict[str, Any]:
        """The fields that the call's `Turn` has, too."""
        return self.model_dump(exclude={"trajectory_id", "scenario", "task_began"})


class Usage(Wire):
    """Token counts of one call, by the sampler."""

    prompt_tokens: int = Field(ge=0, le=2**31 - 1)
    completion_tokens: int = Field(ge=0, le=2**31 - 1)


class Turn(Wire):
    """One model call of a run, as the graph saw it.

    `messages` holds only what this call added: where `extends` is ``k``, the call's full prompt is
    turn ``k``'s prompt, its reply, and then `messages`; where it is ``None``, `messages` is the
    whole prompt. So a run's size grows with its turns, not with their square.

    Example: a tool agent's two calls::

        Turn(call_id="chatcmpl-a", node="model", messages=[system, user], reply=calls_search)
        Turn(call_id="chatcmpl-b", node="model", extends=0, messages=[tool_result], reply=answer)
    """

    call_id: str | None = None
    """The completion's id, under which the server keeps the tokens; None for a foreign model that
    reported none."""
    node: str | None = None
    path: Several[str] = ()
    namespace: str | None = None
    step: int | None = None
    attempt: int = Field(default=1, ge=1)
    thread: str | None = None
    tags: Several[str] = ()
    model: str | None = None
    """The model named in the reply: ``email-agent@17``, or a foreign model's name."""
    extends: int | None = Field(default=None, ge=0)
    messages: Several[Message] = ()
    tools: Several[dict[str, Any]] = ()
    reply: Message | None = None
    """Reply as it was sampled."""
    edited: Message | None = None
    """Reply as the graph changed it in place, if it did: for review. Prompts that repeat it do not
    continue this call."""
    usage: Usage | None = None
    started_at: Finite | None = None
    """Seconds since the epoch, by the client's clock."""
    latency: Finite | None = Field(default=None, ge=0)
    """Seconds."""
    ours: bool = True
    """False for a model that the server does not serve: kept and judged, never trained."""
    excluded_because: str | None = None
    """Reason for which the graph discarded this call (``retried``, ``interrupted``, ``error``,
    ``unchosen``); it is kept for review and never trained."""
    error: str | None = None
    reward: RewardValue | None = None
    """Reward of this call, in addition to the trajectory's (`TrainConfig.credit`); None: none."""

    @property
    def label(self) -> str:
        """Its node with the graphs around it: ``team/writer``; ``-`` outside of a graph."""
        return "/".join(self.path) or self.node or "-"

    @property
    def names(self) -> frozenset[str]:
        """Names that `TrainRequest.trainable` may use: node, path, tags, model, policy."""
        model = self.model or ""
        named = (self.node or "", *self.path, *self.tags, model, model.partition("@")[0])
        return frozenset(name for name in named if name)

    def learns(self, trainable: Mapping[str, bool]) -> bool:
        """True if `trainable` chooses this turn.

        A turn with a name that is False never learns. Of the others, all learn if no name is True,
        else those that have such a name.

        Example::

            Turn(node="critic").learns({"writer": True})     # False
            Turn(node="writer").learns({"critic": False})    # True
        """
        if any(not trainable.get(name, True) for name in self.names):
            return False
        return not any(trainable.values()) or any(trainable.get(name, False) for name in self.names)


#: Key of `Trajectory.metadata` of an evaluation's runs: the versions that it evaluated, as text
#: (`EvalResult.version`).
EVALUATION = "evaluation"
#: Key of `Trajectory.metadata`: what `capture()` could not record, or not wholly, in words.
NOT_HEARD = "not_heard"
Status = Literal["completed", "failed", "interrupted", "truncated"]
#: Most bytes of a run as JSON: half of what a server takes in one request (`max_body_bytes`).
MAX_RUN_BYTES = 16 << 20


class Trajectory(Wire):
    """One run of a graph on one scenario. ``reward=None``: not scored, which is not zero.

    Example::

        Trajectory(id="t-1", scenario="q-7", turns=(first, second), reward=1.0)
    """

    id: Id
    scenario: ScenarioName | None = None
    turns: Several[Turn] = Field(default=(), max_length=4096)
    input: Any = None
    output: Any = None
    reward: RewardValue | None = None
    scores: dict[str, RewardValue] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    status: Status = "completed"
    error: str | None = None

    def _repr_html_(self) -> str:
        return view_html("cli.tables:run_view", self)

    @property
    def total_return(self) -> float | None:
        """Total return of the run: its reward, and those of its calls that count.

        None: neither it nor a call has a reward.
        """
        given = [turn.reward for turn in self.turns if turn.excluded_because is None]
        rewards = [one for one in (self.reward, *given) if one is not None]
        return math.fsum(rewards) if rewards else None

    @model_validator(mode="after")
    def _extends_backwards(self) -> Trajectory:
        for index, turn in enumerate(self.turns):
            if turn.extends is not None and turn.extends >= index:
                raise ValueError(
                    f"turn {index} extends turn {turn.extends}, expected an earlier turn"
                )
        return self

    def prompt(self, index: int) -> list[Message]:
        """All messages of the prompt of turn `index`."""
        parts: list[list[Message]] = []
        turn = self.turns[index]
        while turn.extends is not None:
            earlier = self.turns[turn.extends]
            parts.append([*([earlier.reply] if earlier.reply else []), *turn.messages])
            turn = earlier
        return [*turn.messages, *(message for part in reversed(parts) for message in part)]


def storable(run: Trajectory) -> Trajectory:
    """The run itself; or, if a server cannot store it, a failed run whose `error` says which field.

    That is one with a text or number that JSON does not have, or of more than `MAX_RUN_BYTES`. The
    values to blame are left out; id, calls, rewards and scores stay.
    """
    if 0 < _size(run) <= MAX_RUN_BYTES:
        return run
    bad = unwritable(run)
    fields = ("input", "output", "metadata", "turns", "error")
    sizes = {name: _size(getattr(run, name)) for name in fields}
    largest = max(sizes, key=lambda name: sizes[name])
    why = bad or f"{largest}: {sizes[largest]:,} bytes; a run has {MAX_RUN_BYTES:,} at most"
    why = f"{why}. This is not stored."
    kept = {
        "input": _kept(run.input),
        "output": _kept(run.output),
        "metadata": {key: one for key, one in run.metadata.items() if _kept({key: one})},
        "scores": {key: one for key, one in run.scores.items() if _kept(key)},
        "turns": tuple(turn if _kept(turn) else _without_texts(turn) for turn in run.turns),
        "status": "failed",
        "error": why if run.error is None else f"{escaped(run.error[:2000])} ({why})",
    }
    empty = {"metadata": {}, "turns": tuple(map(_without_texts, run.turns))}
    for name in sorted(fields[:-1], key=lambda name: sizes[name], reverse=True):
        if 0 < _size(found := run.model_copy(update=kept)) <= MAX_RUN_BYTES:
            return found
        kept[name] = empty.get(name)
    return run.model_copy(update=kept)


def _kept(value: Any) -> Any:
    """The value if it can be written; else None."""
    return value if unwritable(value) is None else None


def _size(value: Any) -> int:
    """Bytes of JSON; 0: it is none."""
    try:
        return len(as_json(value))
    except (ValueError, RecursionError):
        return 0


def _without_texts(turn: Turn) -> Turn:
    known = {"messages": (), "tools": (), "reply": None, "edited": None, "error": None}
    return turn.model_copy(update=known)


class TrajectoryGroup(Wire):
    """Runs of one scenario, whose rewards are compared with each other."""

    id: Id
    trajectories: Several[Trajectory] = Field(max_length=1024)
    metadata: dict[str, Any] = Field(default_factory=dict)

    def _repr_html_(self) -> str:
        return view_html("cli.tables:runs_table", self.trajectories)

    @field_validator("trajectories")
    @classmethod
    def _distinct(cls, value: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        ids = [t.id for t in value]
        if len(set(ids)) != len(ids):
            twice = [one for one, times in Counter(ids).items() if times > 1][:5]
            raise ValueError(f"got the same trajectory twice in one group: {twice}")
        return value

    @property
    def rewards(self) -> list[float]:
        """Total returns (`Trajectory.total_return`) of the runs that have one."""
        return [worth for t in self.trajectories if (worth := t.total_return) is not None]

    def marked(self, marks: Mapping[str, Any]) -> TrajectoryGroup:
        """The group, with these marks among the metadata of each of its runs."""
        runs = (
            run.model_copy(update={"metadata": {**run.metadata, **marks}})
            for run in self.trajectories
        )
        return self.model_copy(update={"trajectories": tuple(runs)})


class Reward(Wire):
    """A reward for a trajectory that the server already has, or can assemble from tagged calls."""

    reward: RewardValue | None = None
    """Reward of the run; left out: it stays as it is."""
    turns: dict[str, RewardValue | None] = Field(default_factory=dict, max_length=4096)
    """Call id -> reward of that call alone (`Turn.reward`); None takes it back."""
    scores: dict[str, RewardValue] = Field(default_factory=dict)
    scenario: ScenarioName | None = None
    status: Status = "completed"
    metadata: dict[str, Any] = Field(default_factory=dict)
