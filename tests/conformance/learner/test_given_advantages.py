"""Advantages that come with a step: a hook with a built-in formula is that built-in, to the bit.

The hook runs as the client runs it, and its numbers go over the wire. Runs fail, lack a reward,
fare alike, are cut off, branch, and have calls that are frozen, lost or too old: what the built-in
estimators leave out and count is left out and counted here too.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from langchain_art.credit.credit_assignment import pool_advantages
from langchain_art.errors import InvalidRequest
from langchain_art.training.advantages import advantages_of
from langchain_art.wire import TrainConfig, TrainRequest, Trajectory, TrajectoryGroup, Turn, Usage
from langchain_art_server.jobs.batch_builder import Batch
from langchain_art_server.storage.tables import CallRecord
from tests.support.call_records import record
from tests.support.learner_cases import VOCAB
from tests.support.soak import count

Hook = Callable[[TrajectoryGroup], list[Any]]
TRAINABLE = {"judge": False}
KINDS = ("mean", "standardized", "leave_one_out", "maxrl")


def made_batch(seed: int) -> tuple[list[TrajectoryGroup], dict[str, CallRecord]]:
    """Twelve groups of four runs of one to three calls; every reason to be excluded occurs."""
    rng, records, groups = random.Random(seed), dict[str, CallRecord](), list[TrajectoryGroup]()

    def some(least: int, most: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(least, most))]

    for g in range(12):
        runs: list[Trajectory] = []
        for i in range(4):
            prompt, turns = some(4, 4), list[Turn]()
            for k in range(rng.randint(1, 3)):
                said, name = some(1, 5), f"c-{g}-{i}-{k}"
                made: dict[str, Any] = {
                    "version": 0 if rng.random() < 0.05 else 9,
                    "logprobs": [-rng.uniform(3.0, 5.0) for _ in said],
                    "finish_reason": rng.choice(["stop", "stop", "stop", "length"]),
                    "excluded_because": rng.choice([None] * 9 + ["greedy_decoding"]),
                }
                if rng.random() > 0.05:
                    records[name] = record(name, prompt, said, **made)
                turn: dict[str, Any] = {"node": rng.choice(["writer", "writer", "judge"])}
                turn |= {"excluded_because": rng.choice([None] * 9 + ["retried"])}
                usage = Usage(prompt_tokens=len(prompt), completion_tokens=len(said))
                turns.append(Turn(call_id=name, model="p@9", usage=usage, **turn))
                # A call goes on from the last one's tokens, or from none.
                prompt = ([] if rng.random() < 0.3 else [*prompt, *said]) + some(1, 1)
            status = rng.choice(["completed"] * 8 + ["failed", "truncated"])
            reward = None if status == "failed" else rng.choice([None, 0.0, 1.0, 1.0, 0.3])
            if g % 4 == 3 and reward is not None:
                reward = 0.1  # runs that fare alike
            runs.append(
                Trajectory(id=f"r-{g}-{i}", turns=tuple(turns), reward=reward, status=status)
            )
        groups.append(TrajectoryGroup(id=f"g-{g}", trajectories=tuple(runs)))
    return groups, records


def settled(
    groups: list[TrajectoryGroup],
    records: dict[str, CallRecord],
    config: TrainConfig,
    hook: Hook | None = None,
) -> Batch:
    given = None
    if hook is not None:
        given = {
            k: v for group in groups for k, v in asyncio.run(advantages_of(hook, group)).items()
        }
    request = TrainRequest(
        policy="p",
        groups=tuple(tuple(run.id for run in group.trajectories) for group in groups),
        config=config,
        trainable=TRAINABLE,
        advantages=given,
    )
    sent = TrainRequest.model_validate_json(request.model_dump_json(exclude_unset=True))
    batch = Batch(sent, 9, {version: version - 1 for version in range(1, 10)})
    for group in groups:
        batch.add_group(group.trajectories, records)
    batch.settle()
    return batch


def built_in(kind: str) -> Hook:
    """The formula of `TrainConfig.advantage`, over the runs that have a reward and a call."""

    def hook(group: TrajectoryGroup) -> list[Any]:
        counted = [
            run.reward
            if run.reward is not None and any(turn.learns(TRAINABLE) for turn in run.turns)
            else None
            for run in group.trajectories
        ]
        pool = [[one] for one in counted if one is not None]
        found = iter(pool_advantages(pool, kind) or [[0.0]] * len(pool))
        return [
            next(found)[0] if one is not None else None if run.reward is None else 0.0
            for run, one in zip(group.trajectories, counted, strict=True)
        ]

    return hook


@pytest.mark.soak
@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "run"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_counts_and_reports_are_those_of_the_built_in_estimator(
    kind: str, aggregation: str, mask_truncated: bool
) -> None:
    hook = built_in(kind)

    def token_by_token(group: TrajectoryGroup) -> list[Any]:
        def spread(given: float, run: Trajectory) -> list[list[float]]:
            return [[given] * turn.usage.completion_tokens for turn in run.turns if turn.usage]

        found = zip(group.trajectories, hook(group), strict=True)
        return [None if given is None else spread(given, run) for run, given in found]

    for seed in range(count(1, 2)):
        groups, records = made_batch(seed)
        loss = {"kind": "clip", "aggregation": aggregation}
        same: dict[str, Any] = {"loss": loss, "mask_truncated": mask_truncated}
        expected = settled(groups, records, TrainConfig(advantage=kind, **same))
        left_out = {"groups.zero_variance", "runs.unscored", "calls.frozen"}
        assert expected.rows and left_out <= expected.excluded.keys()
        for one in (hook, token_by_token):
            found = settled(groups, records, TrainConfig(**same), one)
            assert found.rows == expected.rows and found.excluded == expected.excluded
            assert found.metrics == expected.metrics and found.trained == expected.trained
            own, reports = found.nodes(), expected.nodes()
            for name, report in reports.items():
                assert (own[name].tokens, own[name].excluded) == (report.tokens, report.excluded)
                for number in ("advantage_mean", "advantage_abs"):
                    expected_number = pytest.approx(getattr(report, number), abs=1e-12)
                    assert getattr(own[name], number) == expected_number


def test_each_token_may_have_its_own() -> None:
    """Two calls in one row; and a call that is left out is context."""
    turns = [
        Turn(call_id=name, model="p@0", usage=Usage(prompt_tokens=2, completion_tokens=2))
        for name in ("a", "b", "c")
    ]
    records = {
        "a": record("a", [1, 2], [3, 4], version=9),
        "b": record("b", [1, 2, 3, 4, 5], [6, 7], version=9),
        "c": record("c", [1, 2, 3, 4, 5, 6, 7, 8], [9, 10], version=9),
    }
    groups = [TrajectoryGroup(id="g", trajectories=(Trajectory(id="r", turns=tuple(turns)),))]
    batch = settled(groups, records, TrainConfig(), lambda _: [[[1.0, -2.0], None, 0.5]])
    (row,) = batch.rows
    assert row.advantages == [0, 0, 1.0, -2.0, 0, 0, 0, 0, 0.5, 0.5]
    assert row.mask == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert batch.excluded == {"calls.without_advantage": 1}
    (report,) = batch.nodes().values()
    assert (report.advantage_mean, report.advantage_abs) == (0.0, 1.0)
    assert batch.decided["r"][0].advantage == (1.0, -2.0)


def test_what_is_left_out_is_counted() -> None:
    groups, records = made_batch(1)
    nothing = settled(groups, records, TrainConfig(), lambda group: [None] * 4)
    assert not nothing.rows and nothing.excluded["runs.without_advantage"] > 0
    assert nothing.excluded["runs.unscored"] > 0, "why a run without a reward has none is known"
    flat = settled(groups, records, TrainConfig(), lambda group: [0.0] * 4)
    assert not flat.rows and flat.excluded["groups.zero_variance"] > 0


def test_as_many_numbers_as_tokens_or_the_job_says_so() -> None:
    """The client knew no count of tokens, so that it could not tell."""
    run = Trajectory(id="r", turns=(Turn(call_id="a", model="p@0"),))
    with pytest.raises(InvalidRequest, match="'a': got 3 advantages for 2 sampled tokens"):
        settled(
            [TrajectoryGroup(id="g", trajectories=(run,))],
            {"a": record("a", [1], [2, 3], version=9)},
            TrainConfig(),
            lambda _: [[[1.0, 2.0, 3.0]]],
        )
