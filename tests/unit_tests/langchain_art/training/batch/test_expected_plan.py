"""What the client calls flat is what the server leaves out: compared with the server's own plan."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_art.training.batch.expected_plan import group_has_zero_variance
from langchain_art.wire.choices.credit import CreditKind

from langchain_art.wire import (
    OverlongPenalty,
    TrainConfig,
    TrainRequest,
    Trajectory,
    TrajectoryGroup,
    Turn,
    Usage,
)
from langchain_art_server.jobs.batch_builder import Batch
from tests.support.call_records import record
from tests.support.soak import count

CONFIGS: list[dict[str, Any]] = [
    {},
    {"zero_variance_tolerance": 0.3},
    {"advantage": "standardized"},
    {"advantage": {"kind": "standardized", "scores": {"a": 1.0, "b": 0.5}}},
    {"overlong": {"tokens": 8, "buffer": 4}},
    {"credit": "node", "overlong": {"tokens": 8, "buffer": 4}},
    {"credit": {"kind": "turn", "discount": 0.5}},
    *({"credit": kind} for kind in get_args(CreditKind)),
]
VALUES = st.sampled_from([None, 0.0, 0.25, 1.0])


@st.composite
def groups(draw: st.DrawFn) -> TrajectoryGroup:
    runs: list[Trajectory] = []
    for i in range(draw(st.integers(1, 4))):
        turns = [
            Turn(
                call_id=f"c-{i}-{k}",
                node=draw(st.sampled_from(["writer", "critic"])),
                model="p@0",
                excluded_because=draw(st.sampled_from([None, None, None, "retried"])),
                reward=draw(st.one_of(st.none(), VALUES)),
                usage=Usage(prompt_tokens=1, completion_tokens=draw(st.sampled_from([1, 3, 6]))),
            )
            for k in range(draw(st.integers(1, 3)))
        ]
        scores = {name: draw(VALUES) for name in ("a", "b")}
        runs.append(
            Trajectory(
                id=f"r-{i}",
                turns=tuple(turns),
                reward=draw(VALUES),
                scores={name: value for name, value in scores.items() if value is not None},
            )
        )
    return TrajectoryGroup(id="g", trajectories=tuple(runs))


def is_excluded(group: TrajectoryGroup, config: TrainConfig, trainable: dict[str, bool]) -> bool:
    """Whether the server finds nothing to learn from in it."""
    runs = group.trajectories
    ids = tuple(run.id for run in runs)
    batch = Batch(TrainRequest(policy="p", groups=(ids,), config=config, trainable=trainable), 0)
    records = {
        turn.call_id or "": record(turn.call_id or "", said=[2] * turn.usage.completion_tokens)
        for run in runs
        for turn in run.turns
        if turn.usage
    }
    batch.add_group(runs, records)
    batch.settle()
    return any(batch.excluded[f"groups.{why}"] for why in ("zero_variance", "single", "empty"))


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(CONFIGS)), ids=lambda n: str(CONFIGS[n]))
@settings(max_examples=count(50, 1500), deadline=None)
@given(group=groups(), trainable=st.sampled_from([{}, {"critic": False}]))
def test_what_is_called_flat_is_excluded(
    number: int, group: TrajectoryGroup, trainable: dict[str, bool]
) -> None:
    config = TrainConfig(**CONFIGS[number])
    if config.scores:  # with them, rewards of calls are refused
        runs = [
            run.model_copy(
                update={"turns": tuple(t.model_copy(update={"reward": None}) for t in run.turns)}
            )
            for run in group.trajectories
        ]
        group = group.model_copy(update={"trajectories": tuple(runs)})
    flat = group_has_zero_variance(group, "p", config, trainable)
    if config.credit.kind != "anchor":  # the server alone knows which prompts are equal
        assert flat == is_excluded(group, config, trainable)
    elif flat:
        assert is_excluded(group, config, trainable)


def test_the_penalty_for_length_is_a_difference() -> None:
    def run(name: str, tokens: int) -> Trajectory:
        usage = Usage(prompt_tokens=1, completion_tokens=tokens)
        return Trajectory(id=name, reward=1.0, turns=(Turn(call_id=name, usage=usage),))

    pair = TrajectoryGroup(id="g", trajectories=(run("a", 2), run("b", 8)))
    assert group_has_zero_variance(pair, "p", TrainConfig(), {})
    penalized = TrainConfig(overlong=OverlongPenalty(tokens=8, buffer=4))
    assert not group_has_zero_variance(pair, "p", penalized, {})
