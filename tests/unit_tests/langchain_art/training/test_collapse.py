import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from langchain_art.statistics.intervals import Z95, mean_of_scenarios, student_tail
from langchain_art.training.collapse import AT_END, Sign, held_out_sign, new_signs, no_gain
from langchain_art.training.records import EvalResult, StepRecord
from langchain_art.wire import LRSchedule, TrainConfig, TrainResult
from tests.support.soak import count, in_soak_alone

Step = tuple[float | None, float | None]


def step_record(step: int, **fields: Any) -> StepRecord:
    metrics, excluded = fields.pop("metrics", {}), fields.pop("excluded", {})
    result = TrainResult(policy="p", version=step, metrics=metrics, excluded=excluded, nodes={})
    return StepRecord(step=step, results={"p": result}, **fields)


def records(
    rewards: Sequence[Step],
    *,
    flat: Sequence[int] = (),
    entropy: Sequence[float] = (),
    truncated: Sequence[float] = (),
    groups: int = 16,
) -> list[StepRecord]:
    """Steps of so many groups, whose means spread half as much as single runs do."""
    made: list[StepRecord] = []
    for i, (mean, std) in enumerate(rewards):
        metrics = {"entropy": entropy[i]} if entropy else {}
        metrics |= {"truncated_share": truncated[i]} if truncated else {}
        made.append(
            step_record(
                i + 1,
                metrics=metrics,
                excluded={"groups.zero_variance": flat[i]} if flat else {},
                reward_mean=mean,
                reward_std=std,
                reward_ci95=None if std is None else Z95 * std / 2 / math.sqrt(groups),
                groups=groups,
            )
        )
    return made


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([(0.3, 0.4), (0.36, 0.48), (0.0, 0.0)], "fell from 0.360 to 0.000, the same for all"),
        ([(0.36, 0.48), (0.70, 0.46), (0.02, 0.14)], "step 3: rewards fell from 0.700 to 0.020. "),
        ([(0.36, 0.48), (0.0, 0.0)], "to the version that the fit began with"),
        ([(0.3, 0.4), (0.36, 0.48), (0.0, 0.0)], "Roll back to p@1 "),
        ([(0.3, 0.4), (0.36, 0.48), (0.36, 0.48), (0.0, 0.0)], "Roll back to p@2 "),
        ([(0.1, 0.3), (0.9, 0.3), (0.2, 0.3)], ""),  # not below all before
        ([(0.02, 0.14), (0.0, 0.0)], ""),  # seldom right: chance
        ([(1.0, 0.0), (1.0, 0.0), (0.98, 0.14)], ""),  # too small a fall
        ([(0.5, 0.5), (None, None)], ""),
        ([(1.0, 0.0)], ""),
    ],
)
def test_a_fall_of_the_rewards(rewards: list[Step], words: str) -> None:
    found = new_signs(records(rewards))
    assert len(found) == bool(words)
    assert words in "".join(f"{one.words} {one.advice}" for one in found)
    assert new_signs(records(rewards[-2:], groups=2)) == [], "too few to tell a fall from chance"


def test_two_flat_steps_are_told_once() -> None:
    rewards: list[Step] = [(0.4, 0.4), (0.5, 0.5), (0.5, 0.0), (0.5, 0.0)]
    flat = [3, 16, 16, 16]
    for entropy, words in (
        ([0.5, 0.2, 0.01, 0.01], "samples nearly the same every time"),
        ([0.5, 0.4, 0.4, 0.4], "nothing was learned"),
    ):
        made = records(rewards, flat=flat, entropy=entropy)
        assert new_signs(made[:2]) == []
        [sign] = new_signs(made[:3])
        assert sign.words.startswith("step 3: all groups of 2 steps") and words in sign.words
        assert sign.keep is None and "too hard or all too easy" in sign.advice
        assert new_signs(made) == []
    uneven: list[Step] = [(0.1, 0.3), (0.5, 0.5), (0.25, 0.4)]  # rewards of several sizes
    [sign] = new_signs(records(uneven, flat=[3, 16, 16]))
    assert sign.kind == "flat" and "hardly explores" in sign.advice
    assert "too hard" not in sign.advice


def test_flat_steps_are_a_collapse_where_the_rewards_were_better() -> None:
    fallen: list[Step] = [(0.4, 0.4)] * 6 + [(-1.0, 0.0)]
    keeps = [new_signs(records(fallen), ahead)[0].keep for ahead in (0, 1, 2, 9)]
    assert keeps == [5, 4, 3, 0], "with runs ahead as many less"
    rewards: list[Step] = [(0.3, 0.4), *[(0.9, 0.3)] * 5, (0.5, 0.0), (0.5, 0.0)]
    [sign] = new_signs(records(rewards, flat=[0] * 6 + [16] * 2))
    assert (sign.kind, sign.keep) == ("flat", 5) and "worse than in step 6" in sign.words
    solved: list[Step] = [(0.3, 0.4), (0.9, 0.3), (1.0, 0.0), (1.0, 0.0)]
    [done] = new_signs(records(solved, flat=[0, 0, 16, 16], entropy=[1.0, 0.5, 0.01, 0.01]))
    assert done.keep is None


def test_replies_that_are_cut_off_and_an_entropy_that_is_gone_where_rewards_fell() -> None:
    rewards: list[Step] = [(0.4, 0.4)] * 3
    [sign] = new_signs(records(rewards, truncated=[0.1, 0.3, 0.6]))
    assert "60% of the replies are cut off" in sign.words and "10%" in sign.words
    assert sign.keep is None and "OverlongPenalty" in sign.advice
    assert new_signs(records(rewards, truncated=[0.4, 0.5, 0.6])) == []
    better, fallen = (
        list[Step]([(0.1, 0.3), *[(0.9, 0.3)] * 5, last]) for last in ((0.9, 0.3), (0.2, 0.4))
    )
    [sign] = new_signs(records(fallen, truncated=[*[0.1] * 6, 0.6]))
    assert (sign.kind, sign.keep) == ("truncated", 5)
    entropy = [0.5, 0.2, 0.2, 0.2, 0.2, 0.2, 0.04]
    assert new_signs(records(better, entropy=entropy)) == []
    [sign] = new_signs(records(fallen, entropy=entropy))
    assert (sign.kind, sign.keep) == ("entropy", 5)
    assert "0.04 nats a token, and was 0.5" in sign.words


# --- false alarms -------------------------------------------------------------------------------


def healthy(
    draw: random.Random, steps: int, groups: int, size: int, shape: str
) -> list[StepRecord]:
    """A fit whose policy never gets worse: runs of a group share how hard the scenario is."""
    made: list[StepRecord] = []
    for step in range(1, steps + 1):
        level = {"still": 0.3, "learns": 0.2 + 0.7 * step / steps, "seldom": 0.03, "solved": 0.99}
        by_group: list[list[float]] = []
        for _ in range(groups):
            if shape == "normal":
                middle = draw.gauss(0, 1)
                by_group.append([middle + draw.gauss(0, 1) for _ in range(size)])
                continue
            # Beta with the mean of the level and a + b = 2: half of the variance is the scenario's.
            rate = draw.betavariate(2 * level[shape], 2 - 2 * level[shape])
            by_group.append([float(draw.random() < rate) for _ in range(size)])
        metrics = {"entropy": 0.5 / step, "truncated_share": draw.uniform(0, 0.6)}
        excluded = {"groups.zero_variance": sum(len(set(one)) == 1 for one in by_group)}
        made.append(of_runs(step, by_group, metrics=metrics, excluded=excluded))
    return made


def of_runs(step: int, by_group: list[list[float]], **fields: Any) -> StepRecord:
    runs = [reward for group in by_group for reward in group]
    return step_record(
        step,
        reward_mean=statistics.fmean(runs),
        reward_std=statistics.stdev(runs),
        reward_ci95=mean_of_scenarios(by_group).ci95,
        groups=len(by_group),
        runs=len(runs),
        **fields,
    )


HEALTHY = count(1, 200)


@pytest.mark.soak
@pytest.mark.parametrize("shape", ["still", "learns", "seldom", "solved", "normal"])
@pytest.mark.parametrize(("groups", "size"), [(16, 8), (4, 4), (2, 8)])
def test_a_healthy_noisy_fit_raises_no_alarm(shape: str, groups: int, size: int) -> None:
    """Fits of 60 steps: at 1e-5 a step, 0.01 false alarms of a fit are expected in all 15 cases."""
    seed = 7
    draw, false = random.Random(f"{seed}{shape}{groups}"), list[Sign]()
    for _ in range(HEALTHY):
        history = healthy(draw, 60, groups, size, shape)
        for n in range(2, len(history) + 1):
            false += [one for one in new_signs(history[:n]) if one.keep is not None]
    assert not false, f"{seed=}: false alarms in {60 * HEALTHY} steps: {false}"


@pytest.mark.parametrize(("before", "after"), [(0.36, 0.0), (0.9, 0.1)])
def test_steps_of_four_groups_show_a_collapse_together(before: float, after: float) -> None:
    """Within four steps, which have as many groups as one step of sixteen; hardly any is missed."""
    draw, found = random.Random(12), list[tuple[int, int | None]]()
    for _ in range(50):
        history: list[StepRecord] = []
        for step in range(1, 13):
            rate = before if step <= 8 else after
            runs = [[float(draw.random() < rate) for _ in range(8)] for _ in range(4)]
            history.append(of_runs(step, runs))
            signs = [one for one in new_signs(history) if one.keep is not None]
            if signs:
                found.append((step, signs[0].keep))
                break
    assert len(found) >= 48 and {step for step, _ in found} <= {9, 10, 11, 12}, "seed 12"
    assert {keep for _, keep in found} <= {6, 7, 8}, "seed 12"


# --- Student's t --------------------------------------------------------------------------------


def integral(density: Callable[[float], float], low: float, high: float, parts: int) -> float:
    """By Simpson's rule."""
    width = (high - low) / parts
    inner = sum((4 if i % 2 else 2) * density(low + i * width) for i in range(1, parts))
    return (density(low) + inner + density(high)) * width / 3


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 95])
@pytest.mark.parametrize("t", [0.0, 0.5, 2.0, 6.0])
def test_the_tail_of_students_t(t: float, freedom: int) -> None:
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    scale /= math.sqrt(freedom * math.pi)
    inside = integral(lambda x: scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2), 0, t, 2000)
    assert student_tail(t, freedom) == pytest.approx(0.5 - inside, abs=1e-11)


BOUND = 0.02
#: `step_kl` of steps that are far too short, and of the demo's.
LOW, DEMO = [4e-4, 3e-4, 5e-4, 4e-4, 3e-4, 5e-4], [0.003, 0.0008, 0.002, 0.0009, 0.004]


def moving(moves: Sequence[float | None], rewards: Sequence[float] = ()) -> list[StepRecord]:
    means = rewards or [0.4] * len(moves)
    told = [{} if one is None else {"step_kl": one, "learning_rate": 6e-5} for one in moves]
    made = records([(mean, 0.4) for mean in means])
    return [
        step_record(
            one.step, metrics=metrics, **one.model_dump(exclude={"kind", "step", "results"})
        )
        for one, metrics in zip(made, told, strict=True)
    ]


def configs(rate: float | None = 6e-5, warmup: int = 0, **options: Any) -> dict[str, TrainConfig]:
    schedule = LRSchedule(warmup_steps=warmup)
    return {"p": TrainConfig(learning_rate=rate, schedule=schedule, **options)}


def said_at(history: Sequence[StepRecord], **options: Any) -> list[int]:
    """The steps with which it is said that the policy hardly moves."""
    return [
        n
        for n in range(1, len(history) + 1)
        if any(one.kind == "unmoved" for one in new_signs(history[:n], 0, configs(**options)))
    ]


def test_a_policy_that_hardly_moves_is_said_once_with_the_figure_and_what_to_do() -> None:
    assert said_at(moving([*LOW, *LOW])) == [5]
    [sign] = new_signs(moving(LOW[:5]), 0, configs())
    assert sign.words.startswith("step 5: p hardly learns: most of the last 5 steps moved it by ")
    assert "0.0004 nats a token or less (step_kl), max_kl=0.02 allows 50 times" in sign.words
    assert "learning_rate, 6e-05, is too low: name 0.0003, or none" in sign.advice
    assert sign.keep is None, "nothing is rolled back"
    [sign] = new_signs(moving(LOW[:5]), 0, configs(rate=None))
    assert "to begin higher, name TrainConfig(learning_rate=0.0003)" in sign.advice

    history = moving(LOW[:5])
    for one, entropy in zip(history, [0.165, 0.17, 0.03, 1e-6, 1e-6], strict=True):
        one.results["p"].metrics["entropy"] = entropy
    [sign] = new_signs(history, 0, configs())
    assert "its entropy is 1e-06 nats a token, and was 0.17." in sign.words
    assert sign.advice.startswith("A higher rate does not help. Go back")


def test_a_policy_that_moves_or_learns_is_not_said_to_stand_still() -> None:
    assert said_at(moving(DEMO)) == []
    assert said_at(moving([BOUND / 2, BOUND / 8, *LOW])) == [5], "Adam's first steps are long"
    assert said_at(moving([*LOW[:3], *[BOUND / 20] * 9])) == [5], "most of them"
    assert said_at(moving([*[BOUND / 20] * 5, *LOW, *DEMO, *LOW])) == [8], "once"
    assert said_at(moving(LOW), max_kl=None) == [], "nothing is measured"
    assert said_at(moving(LOW), max_kl=0.005) == []
    assert said_at(moving(LOW, [0.2, 0.6, 0.7, 0.8, 0.9, 0.9])) == []
    assert said_at(moving(LOW, [0.40, 0.45, 0.38, 0.44, 0.42, 0.4])) == [5], "chance is no rise"
    # Steps of the warm-up and without training do not count.
    assert said_at(moving([*LOW, *LOW]), warmup=3) == [8]
    assert said_at(moving([*LOW[:4], *[BOUND] * 4, *LOW]), warmup=5) == [11]
    assert said_at(moving([LOW[0], None, *LOW[1:3], 0.0, LOW[3], None, LOW[4], None])) == [8]


def evaluation(step: int, rewards: Sequence[float], version: int | None = None) -> EvalResult:
    """An evaluation of scenarios with these mean rewards."""
    return EvalResult(
        step=step,
        versions=(f"p@{step if version is None else version}",),
        mean=statistics.fmean(rewards) if rewards else None,
        ci95=0.1,
        n=len(rewards),
        scenarios={f"q-{i}": reward for i, reward in enumerate(rewards)},
    )


def steps(count: int) -> list[StepRecord]:
    known = {"reward_mean": 0.5, "reward_std": 0.5, "groups": 16}
    return [step_record(step, **known) for step in range(1, count + 1)]


def solved(count: int, of: int = 60) -> list[float]:
    return [float(i < count) for i in range(of)]


def test_an_end_below_the_best_kept_version_is_seen_and_keeps_it() -> None:
    """The best one is not the first, and the last is above the first."""
    evals = [evaluation(0, solved(6)), evaluation(2, solved(20)), evaluation(4, solved(18))]
    found = held_out_sign([*evals, evaluation(6, solved(10))], steps(6), at_end=True)
    assert found is not None and (found.kind, found.keep) == ("held_out", 2)
    assert "fell from 0.333 (p@2) to 0.167 (p@6): 10 scenarios fell and 0 rose" in found.words
    assert "Roll back to p@2" in found.advice


def test_within_a_fit_more_is_asked_for_than_at_its_end() -> None:
    evals = [evaluation(0, solved(20)), evaluation(2, solved(12))]  # 2^-8 = 0.004
    assert held_out_sign(evals, steps(2)) is None
    assert held_out_sign(evals, steps(2), at_end=True) is not None
    assert held_out_sign([evals[0], evaluation(2, solved(9))], steps(2)) is not None  # 2^-11


@pytest.mark.parametrize(
    "evals",
    [
        [],
        [evaluation(0, solved(20))],
        [evaluation(0, solved(20)), evaluation(2, [])],
        [evaluation(0, solved(20)), evaluation(2, solved(15))],  # 2^-5
        [evaluation(0, solved(20)), evaluation(2, solved(40))],
        [evaluation(0, solved(60), 1), evaluation(2, solved(0), 1)],  # the same version
        [evaluation(0, [1.0] * 6), evaluation(2, [0.0] * 6)],  # 2^-6
        [  # no scenarios in common
            evaluation(0, solved(60)),
            evaluation(2, solved(0)).model_copy(update={"scenarios": {"other": 0.0}}),
        ],
    ],
)
def test_what_may_be_chance_is_no_fall(evals: list[EvalResult]) -> None:
    assert held_out_sign(evals, steps(2), at_end=True) is None


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(("count", "scenarios"), [in_soak_alone(2, 100), (2, 12), (6, 50)])
def test_a_fit_that_gets_no_worse_is_seldom_taken_back(
    count: int, scenarios: int, samples: int
) -> None:
    """At most one end in a hundred; 400 fits, so that more than 14 have a probability of 2e-5."""
    seed = 5
    draw, false = random.Random(f"{seed}{count}{scenarios}{samples}"), 0
    for _ in range(400):
        rates = [draw.betavariate(0.7, 1.3) for _ in range(scenarios)]
        evals = [
            evaluation(
                step, [sum(draw.random() < p for _ in range(samples)) / samples for p in rates]
            )
            for step in range(count)
        ]
        false += held_out_sign(evals, [], at_end=True) is not None
    assert false <= 14, f"{seed=}: {false} false alarms in 400 fits at the level {AT_END}"


def test_a_policy_that_lost_half_is_mostly_seen() -> None:
    """0.33 and 0.17 of 100 questions with rates that vary: 200 fits of two evaluations."""
    seed = 6
    draw, seen = random.Random(seed), 0
    for _ in range(200):
        rates = [draw.betavariate(0.66, 1.34) for _ in range(100)]
        before, after = (
            evaluation(step, [float(draw.random() < p * left) for p in rates])
            for step, left in ((0, 1.0), (12, 0.5))
        )
        seen += held_out_sign([before, after], steps(12), at_end=True) is not None
    assert seen > 140, f"{seed=}: {seen} of 200"


def with_mean(step: int, mean: float | None, ci95: float | None = 0.06) -> EvalResult:
    return EvalResult(step=step, versions=(f"p@{step}",), mean=mean, ci95=ci95, n=100)


@pytest.mark.parametrize(
    ("means", "patience", "stops"),
    [
        ([0.3, 0.5, 0.52, 0.53], 2, True),
        ([0.3, 0.5, 0.52, 0.53], 3, False),
        ([0.3, 0.5, 0.55, 0.6], 2, False),  # small gains add up: 0.6 is above 0.5 + 0.085
        ([0.3, 0.32], 2, False),
        ([0.3, 0.9, 0.1, 0.1], 2, True),
        ([], 1, False),
    ],
)
def test_when_a_fit_has_gained_enough(means: list[float], patience: int, stops: bool) -> None:
    found = no_gain([with_mean(step, mean) for step, mean in enumerate(means)], patience)
    assert (found is not None) is stops
    if found:
        assert f"stop_early={patience}" in found
    evals = [with_mean(0, 0.3), with_mean(1, None, None), with_mean(2, 0.31, None)]
    assert no_gain(evals, 1) is None, "without an interval it is no gain and no loss"
