"""The control of a demo: the same fit, with rewards that say nothing of the runs."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from langchain_art import TrajectoryGroup, Turn
from langchain_art.evaluators.scoring import score_group

Evaluator = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup]]


def shuffled(seed: int, evaluator: Any = None) -> Evaluator:
    """The control: what the runs of a group are worth, dealt out at random within it.

    Rewards of calls are dealt out, too: the sums of a node's calls among the runs that have it.

    Args:
        seed: Of the dealing out.
        evaluator: Scores the runs first. None: they bring their rewards.
    """

    async def score(group: TrajectoryGroup) -> TrajectoryGroup:
        if evaluator is not None:
            group = await score_group(group, evaluator)
        rng = random.Random(f"{seed}:{group.id}")
        rewards = [run.reward or 0.0 for run in group.trajectories]
        rng.shuffle(rewards)
        sums = [_sums(run.turns) for run in group.trajectories]
        for node in dict.fromkeys(node for found in sums for node in found):
            having = [found for found in sums if node in found]
            dealt = rng.sample([found[node] for found in having], len(having))
            for found, worth in zip(having, dealt, strict=True):
                found[node] = worth
        runs = [
            run.model_copy(update={"reward": reward, "turns": _rewarded(run.turns, found)})
            for run, reward, found in zip(group.trajectories, rewards, sums, strict=True)
        ]
        return group.model_copy(update={"trajectories": tuple(runs)})

    return score


def _sums(turns: Sequence[Turn]) -> dict[str, float]:
    """By node: what its calls are worth together; without those that have no reward."""
    sums: dict[str, float] = {}
    for turn in turns:
        if turn.reward is not None:
            sums[turn.node or ""] = sums.get(turn.node or "", 0.0) + turn.reward
    return sums


def _rewarded(turns: Sequence[Turn], sums: Mapping[str, float]) -> tuple[Turn, ...]:
    """The calls, of which the last of each node is worth the node's sum."""
    last = {turn.node or "": at for at, turn in enumerate(turns) if turn.reward is not None}
    return tuple(
        turn.model_copy(update={"reward": sums.get(turn.node or "")})
        if last.get(turn.node or "") == at
        else turn.model_copy(update={"reward": None})
        for at, turn in enumerate(turns)
    )
