import math
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_art import AnchorCredit, Trainer
from langchain_art.errors import ConfigError
from langchain_art.training.advantages import advantages_of, check_hook, group_has_zero_variance
from langchain_art.training.fit_export import exclusions
from langchain_art.training.fit_state import PendingStep
from langchain_art.wire import (
    Standardized,
    TrainConfig,
    TrainRequest,
    Trajectory,
    TrajectoryGroup,
    Turn,
    Usage,
)
from langchain_art.wire.choices import CreditKind
from langchain_art_server.jobs.batch_builder import Batch
from tests.support.call_records import record
from tests.support.soak import count


def run(name: str, *tokens: int, **more: Any) -> Trajectory:
    usages = (Usage(prompt_tokens=1, completion_tokens=n) for n in tokens)
    turns = [Turn(call_id=f"{name}-{k}", model="p@0", usage=one) for k, one in enumerate(usages)]
    return Trajectory(id=name, turns=tuple(turns), **({"reward": 1.0} | more))


GROUP = TrajectoryGroup(id="g", trajectories=(run("a", 2, 3), run("b", 1)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0.5, None), {"a": (0.5, 0.5)}),
        ([None, None], {}),
        ([[1, None], [2]], {"a": (1.0, None), "b": (2.0,)}),
        ([[[1, 2], 3.0], 4], {"a": ((1.0, 2.0), 3.0), "b": (4.0,)}),
        (np.array([0.5, -1.0]), {"a": (0.5, 0.5), "b": (-1.0,)}),
        ([np.float32(0.5), [np.array([2.0])]], {"a": (0.5, 0.5), "b": ((2.0,),)}),
    ],
)
async def test_a_number_for_each_run_call_or_token(given: Any, expected: Any) -> None:
    assert await advantages_of(lambda _: given, GROUP) == expected

    async def later(group: TrajectoryGroup) -> Any:
        return given

    assert await advantages_of(later, GROUP) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "the group 'g': got None, expected a list with one entry for each of 2 runs"),
        ([0.5], r"the group 'g': got 1 entries, \[0.5\], expected"),
        ({"a": 1.0, "b": 2.0}, "the group 'g': got {"),
        ([0.5, math.nan], "the run 'b': got nan, expected finite numbers"),
        ([0.5, True], "the run 'b': got True"),
        ([0.5, "1"], "the run 'b': got '1'"),
        ([0.5, 1e10], "the run 'b': got 10000000000.0, expected finite numbers of at most 1e9"),
        ([[1.0], 1.0], "the run 'a': got 1 entries, .*expected a number, None, or .* 2 turns"),
        ([[1.0, [1.0]], 1.0], "turn 1 of the run 'a': got 1 entries.*its 3 sampled tokens"),
        ([[1.0, [1.0, math.nan, 2.0]], 1.0], "turn 1 of the run 'a': got 3 entries"),
    ],
)
async def test_another_shape_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"advantages of {words}"):
        await advantages_of(lambda _: given, GROUP)


async def test_what_it_raises_names_the_group() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        await advantages_of(lambda _: [1 / 0], GROUP)
    assert raised.value.__notes__ == ["raised by advantages= for the group 'g'"]


def test_what_would_not_be_read_and_what_is_no_function_is_refused() -> None:
    for config, unread in (
        (TrainConfig(advantage="maxrl"), "advantage"),
        (TrainConfig(credit=AnchorCredit()), "credit"),
        (TrainConfig(credit="node", advantage="mean"), "advantage, credit"),
    ):
        with pytest.raises(ConfigError, match=f"together with TrainConfig.{unread}="):
            Trainer("p", config=config, advantages=lambda group: [])
        with pytest.raises(ValueError, match=f"together with {unread}, which would not be read"):
            TrainRequest(policy="p", groups=(("a",),), config=config, advantages={})
    each = {"p": TrainConfig(), "q": TrainConfig(credit="turn")}
    with pytest.raises(ConfigError, match=r"together with TrainConfig\(credit=…\)"):
        Trainer(["p", "q"], config=each, advantages=lambda group: [])
    with pytest.raises(ConfigError, match="got advantages='mean', expected a function"):
        check_hook("mean", {"p": TrainConfig()})
    with pytest.raises(ValueError, match=r"got advantages for \['b'\], expected runs of `groups`"):
        TrainRequest(policy="p", groups=(("a",),), advantages={"b": (1.0,)})
    with pytest.raises(ValueError, match="neither `rewards`, `turns` nor `compared`"):
        TrainRequest(policy="p", groups=(("a",),), advantages={}, rewards={"a": 1.0})


def test_zero_variance_is_of_the_given_numbers() -> None:
    """The rewards of the runs are equal; a node that does not learn counts for nothing."""
    config = TrainConfig()
    assert group_has_zero_variance(GROUP, "p", config, {})
    assert not group_has_zero_variance(GROUP, "p", config, {}, {"a": (0.0, (0.0, 0.1, 0.0))})
    assert group_has_zero_variance(
        GROUP, "p", config, {}, {"a": (0.0, (0.0, 0.0, 0.0)), "b": (None,)}
    )
    assert group_has_zero_variance(GROUP, "p", config, {}, {})
    judged = run("c", 1).model_copy(update={"turns": (Turn(call_id="c", node="judge"),)})
    group = TrajectoryGroup(id="h", trajectories=(judged,))
    assert group_has_zero_variance(group, "p", config, {"judge": False}, {"c": (1.0,)})


CONFIGS: list[dict[str, Any]] = [
    {},
    {"zero_variance_tolerance": 0.3},
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
    """True if the server finds nothing to learn from in it."""
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
@settings(max_examples=count(20, 1500), deadline=None)
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


SCORED = (run("a", 1, 1), run("b", 1, 1), run("c", 1, reward=None))
RUNS = (*SCORED, run("d", 1, reward=None, status="failed"))
FLAT, GIVEN = ["groups.zero_variance"] * 2, ["runs.without_advantage"] * 2


@pytest.mark.parametrize(
    ("advantages", "a", "b", "c"),
    [
        (None, FLAT, FLAT, ["runs.unscored"]),
        (
            {"a": (1.0, None), "c": ((0.5,),)},
            [None, "calls.without_advantage"],
            GIVEN,
            [None],
        ),
        ({"a": (0.0, 0.0)}, ["groups.single"] * 2, GIVEN, ["runs.unscored"]),
    ],
)
def test_an_export_says_why_calls_do_not_learn_as_the_server_will_count(
    advantages: Any, a: Any, b: Any, c: Any
) -> None:
    group = TrajectoryGroup(id="g", trajectories=RUNS)
    config = {"p": TrainConfig()}
    pending = PendingStep(step=1, groups=(group,), configs=config, advantages=advantages)
    assert exclusions(pending) == {"a": a, "b": b, "c": c, "d": ["runs.failed"]}


def test_a_call_is_judged_by_the_config_of_the_policy_that_sampled_it() -> None:
    scored = TrainConfig(advantage=Standardized(scores={"style": 1.0}))
    names = ("p@0", "q@1", "frozen@1")
    turns = tuple(Turn(call_id=f"c{n}", model=name) for n, name in enumerate(names))
    runs = tuple(Trajectory(id=f"r{n}", turns=turns, reward=float(n)) for n in range(4))
    group, configs = TrajectoryGroup(id="g", trajectories=runs), {"p": TrainConfig(), "q": scored}
    found = exclusions(PendingStep(step=1, groups=(group,), configs=configs))
    assert found["r0"] == [None, "runs.unscored", "calls.other_policy"]
