"""The rewards of a trajectory: how they change, and a snapshot for a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_art.errors import InvalidRequest
from langchain_art.wire import Reward, Status, TrainRequest, Trajectory, Turn


@dataclass(frozen=True)
class RewardSnapshot:
    """A trajectory's rewards at one moment.

    It is stored with a job, which trains with these rewards though they change later, and also
    when it is run again after a restart.
    """

    reward: float | None
    scores: Mapping[str, float]
    status: Status
    turns: Sequence[float | None]
    """`Turn.reward` of each turn; empty if no turn has one."""

    @classmethod
    def of(cls, run: Trajectory, request: TrainRequest) -> RewardSnapshot:
        """A trajectory's rewards now, or those that the request has for it and its calls."""
        reward = request.rewards.get(run.id)
        turns = [request.turns.get(turn.call_id or "") for turn in run.turns]
        if reward is None and not _any(turns):
            reward, turns = run.reward, [turn.reward for turn in run.turns]
        return cls(reward, run.scores, run.status, turns if _any(turns) else ())

    def on(self, run: Trajectory) -> Trajectory:
        """The trajectory with these rewards."""
        rewards = self.turns or [None] * len(run.turns)
        return run.model_copy(
            update={
                "reward": self.reward,
                "scores": dict(self.scores),
                "status": self.status,
                "turns": tuple(map(_with, run.turns, rewards)),
            }
        )


def changed(run: Trajectory, reward: Reward, turns: Sequence[Turn] | None = None) -> Trajectory:
    """The trajectory with the given fields of `reward` set; scores and metadata are added.

    `turns` replace its turns, of which those that were there keep their rewards.

    Raises InvalidRequest: the trajectory does not have a call that a reward is for.
    """
    rewards = {turn.call_id: turn.reward for turn in run.turns} | reward.turns
    new = run.turns if turns is None else turns
    if unknown := sorted(set(reward.turns) - {turn.call_id for turn in new}):
        raise InvalidRequest(
            f"got rewards for the calls {unknown[:5]}, which trajectory {run.id!r} does not have; "
            f"expected ids of its {len(new)} calls (`call_id` in GET /v1/trajectories/{run.id})",
            param="turns",
        )
    changes: dict[str, Any] = {
        "scores": run.scores | reward.scores,
        "metadata": run.metadata | reward.metadata,
        "scenario": reward.scenario or run.scenario,
        "turns": tuple(_with(turn, rewards.get(turn.call_id, turn.reward)) for turn in new),
    }
    for name in {"reward", "status"} & reward.model_fields_set:
        changes[name] = getattr(reward, name)
    return run.model_copy(update=changes)


def rewards_in_words(run: Trajectory) -> str:
    """The rewards of a trajectory and its calls, for messages and comparison."""
    calls = {turn.call_id: turn.reward for turn in run.turns if turn.reward is not None}
    return f"{run.reward}" + (f" and {calls} of its calls" if calls else "")


def _with(turn: Turn, reward: float | None) -> Turn:
    return turn if turn.reward == reward else turn.model_copy(update={"reward": reward})


def _any(rewards: Sequence[float | None]) -> bool:
    return any(one is not None for one in rewards)
