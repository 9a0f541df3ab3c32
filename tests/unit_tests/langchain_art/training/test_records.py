import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from langchain_art.errors import ConfigError
from langchain_art.training.fit_settings import check_trainable, unmatched_frozen_names
from langchain_art.training.progress import Display, MeanReward
from langchain_art.training.records import EvalResult, FitResult, StepRecord, summarize, total_nodes
from langchain_art.training.report import (
    Curve,
    all_alike,
    excluded_counts,
    node_table,
    nothing_trained,
    overflowed,
    summary_table,
    text_plot,
)
from langchain_art.wire import NodeReport, TrainResult, Trajectory, Turn
from tests.support import fits


def node(tokens: int, abs_: float = 0.5, mean: float = 0.0, **excluded: int) -> NodeReport:
    return NodeReport(
        calls=tokens // 8, tokens=tokens, advantage_mean=mean, advantage_abs=abs_, excluded=excluded
    )


def result(policy: str, version: int = 1, **more: Any) -> TrainResult:
    return TrainResult(
        **({"policy": policy, "version": version, "metrics": {}, "excluded": {}} | more)
    )


def step(*results: TrainResult, number: int = 1, **more: Any) -> StepRecord:
    found: dict[str, Any] = {"reward_mean": 0.5, "reward_std": 0.1, "groups": 2} | more
    return StepRecord(step=number, results={r.policy: r for r in results}, **found)


ONE = result(
    "agent",
    metrics={"loss": 0.5},
    excluded={"calls.frozen": 2},
    nodes={"writer": node(16), "critic": node(0, 0.0, frozen=2)},
)
WRITER = result(
    "w",
    3,
    metrics={"loss": 0.25},
    excluded={"calls.other_policy": 2},
    nodes={"writer": node(16), "critic": node(0, 0.0, other_policy=2)},
)
CRITIC = result(
    "c",
    2,
    metrics={"loss": 0.75},
    excluded={"calls.other_policy": 2},
    nodes={"critic": node(8), "writer": node(0, 0.0, other_policy=2)},
)


def screen(*shown: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(*shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def told(say: Callable[[Display], object], width: int = 80) -> str:
    """What is shown on the way of a fit."""
    out = io.StringIO()
    say(Display(Console(file=out, width=width)))
    return out.getvalue()


def displayed(record: StepRecord, *, first: bool) -> str:
    return told(lambda display: display.step(record, 9, first=first))


def test_one_policy_is_spoken_of_plainly() -> None:
    record = step(ONE, unjudged=3)
    assert (record.version, record.metrics) == (1, {"loss": 0.5})
    assert record.excluded == {"calls.frozen": 2, "groups.unjudged": 3}
    assert list(record.nodes) == ["writer", "critic"]
    found = FitResult(fit_id="f", versions={"agent": 2}, history=(record, record))
    assert (found.policy, found.version, found.adapter) == ("agent", 2, "agent@2")
    assert found.excluded == {"calls.frozen": 4, "groups.unjudged": 6}
    assert found.nodes["writer"].tokens == 32
    assert 'ChatART(model="agent@2")' in screen(summary_table(found), width=100)
    best = EvalResult(mean=0.9, ci95=0.1, n=4, versions=("agent@1",), step=1)
    text = screen(summary_table(found.model_copy(update={"best": best})), width=100)
    assert 'ChatART(model="agent@1")  the best; the newest is "agent@2"' in text
    first, later = displayed(record, first=True), displayed(record, first=False)
    assert "mean |A|" in first and "frozen 2" in first and "mean |A|" not in later
    assert "trained: writer 16 tokens, |A| 0.50" in later


def test_several_policies_are_told_apart() -> None:
    record = step(WRITER, CRITIC)
    assert record.versions == {"w": 3, "c": 2}
    assert record.metrics == {"w/loss": 0.25, "c/loss": 0.75}
    assert record.excluded == {"w/calls.other_policy": 2, "c/calls.other_policy": 2}
    assert list(record.nodes) == ["w/writer", "c/critic"], "each node once, with who learns there"
    assert excluded_counts(record) == "", "what the other policy trains is not excluded"
    record = record.model_copy(update={"tokens": {"completion": 40}})
    found = FitResult(fit_id="f", versions=record.versions, history=(record,))
    text = screen(summary_table(found), node_table(found.nodes, "by node"))
    for words in ("w and c: 1 step ", "0 read, 40 sampled, 24 trained", '"w@3"', '"c@2"'):
        assert words in text
    assert max(map(len, displayed(record, first=True).splitlines())) <= 80
    assert found.adapters == ("w@3", "c@2")
    for name in ("policy", "version", "adapter"):
        with pytest.raises(ConfigError, match="w and c"):
            getattr(found, name)
    with pytest.raises(ConfigError, match="versions"):
        _ = record.version
    assert EvalResult(mean=0.5, ci95=None, n=1, versions=("w@3", "c@2")).version == "w@3 + c@2"


def test_nodes_add_up_weighted_by_their_tokens() -> None:
    first = {"a": node(30, 0.2, 0.1, frozen=1)}
    second = {"a": node(10, 0.6, -0.1, frozen=2, lost=1), "b": node(0, 0.0)}
    found = total_nodes([first, second])
    assert (found["a"].tokens, found["a"].calls) == (40, 4)
    assert found["a"].advantage_abs == pytest.approx(0.3)
    assert found["a"].advantage_mean == pytest.approx(0.05)
    assert found["a"].excluded == {"frozen": 3, "lost": 1}
    assert (found["b"].tokens, found["b"].advantage_abs) == (0, 0.0)


def test_training_on_nothing_cannot_be_overlooked() -> None:
    flat = result("agent", 0, excluded={"groups.zero_variance": 2})
    for first in (True, False):
        text = displayed(step(flat, unjudged=1), first=first)
        assert "step 1 trained agent on NOTHING; it stays at agent@0" in text
        assert "2 groups.zero_variance: all runs of a group have the same reward" in text
        assert "1 groups.unjudged" in text
    frozen = result("agent", 0, excluded={"calls.frozen": 4}, nodes={"a": node(0, 0.0, frozen=4)})
    assert "trainable= does not choose it" in displayed(step(frozen), first=True)
    assert nothing_trained(step(ONE)) == []
    [line] = nothing_trained(step(WRITER, result("c", 0)))
    assert "trained c on NOTHING" in line, "the other policy did learn"


def test_updates_that_overflowed_float16_are_said() -> None:
    metrics = {"overflows": 2.0, "loss_scale": 16384.0}
    record = step(WRITER, result("c", nodes={"n": node(8)}, metrics=metrics))
    text = told(lambda display: display.step(record, 3, first=False), width=200)
    [line] = [line for line in text.splitlines() if "float16" in line]
    assert "c: 2 updates overflowed" in line and "skipped" in line and "now 16384" in line
    assert overflowed(result("c", metrics=metrics | {"overflows": 0.0})) == []


# --- rewards of nodes, and what a fit took -----------------------------------------------


def scored(name: str, own: float | None = None, **by_node: float) -> Trajectory:
    turns = tuple(Turn(node=node, reward=reward) for node, reward in by_node.items())
    return Trajectory(id=name, scenario=name, turns=turns, reward=own)


def test_an_evaluation_is_of_the_total_return() -> None:
    runs = [scored("a", writer=1.0, critic=0.5), scored("b", 0.0, writer=0.0), scored("c")]
    found = summarize(runs, step=0, versions=["p@0"], seconds=1.0)
    assert (found.mean, found.n, found.unscored) == (0.75, 2, 1)
    assert found.node_rewards == {"writer": 0.5, "critic": 0.5}
    assert str(found) == "0.750 ± 1.470 (n=2, 1 unscored)"
    text = told(lambda display: display.eval(found))
    assert "by node: writer 0.500, critic 0.500" in text


def test_an_evaluation_of_several_runs_a_scenario_tells_pass_at_k() -> None:
    runs = [scored("a", 1.0), scored("a", 0.0), scored("b", 0.0), scored("b", 0.0)]
    found = summarize(runs, step=0, versions=["p@0"], seconds=1.0)
    assert found.best_of == {1: 0.25, 2: 0.5}
    fit = FitResult(fit_id="f", versions={"p": 0}, history=(step(ONE),), after=found)
    text = screen(summary_table(fit), width=120)
    for shown in (told(lambda display: display.eval(found)), text):
        assert "best of 1: 0.250, 2: 0.500 (pass@k where rewards are 0 and 1)" in shown
    once = summarize(runs[:1] + runs[2:3], step=0, versions=["p@0"], seconds=1.0)
    fit = fit.model_copy(update={"after": once})
    assert "best of" not in screen(summary_table(fit), width=120)


def test_the_bars_words_are_the_mean_and_not_one_runs_reward() -> None:
    words, failed = MeanReward(), Trajectory(id="d", status="failed")
    assert words(scored("a")) == "no rewards yet"
    assert words(scored("b", 1.0)) == "mean reward 1.000"
    assert words(scored("c", writer=0.0)) == "mean reward 0.500"
    assert words(failed) == "mean reward 0.500, 1 failed"


def test_the_bar_fits_80_columns_and_does_not_move() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False)
    display = Display(console)
    places = set[tuple[int, int]]()
    with display.bar("steps", 3000), display.bar("rollouts", 12800) as advance:
        for words in ("", "mean reward 0.5", "mean reward -10.125, 1234 failed"):
            advance(words, by=900)
            lines = console.render_lines(display._bars.get_renderable(), pad=False)
            rows = ["".join(part.text for part in line) for line in lines]
            assert max(map(len, rows)) <= 80, rows
            assert words[:20] in rows[1]
            places.add((rows[1].index("/"), len(rows[1])))
    assert len(places) == 1, places


# --- which calls learn ----------------------------------------------------------------------------

RUNS = [
    Trajectory(
        id="t",
        turns=(
            Turn(node="writer", path=("team", "writer"), model="agent@3", tags=("loud",)),
            Turn(node="critic", model="gpt-9", ours=False),
        ),
    )
]


def test_a_name_that_is_none_is_said() -> None:
    names = ("writer", "team", "agent", "agent@3", "loud", "critic", "gpt-9")
    assert unmatched_frozen_names(dict.fromkeys(names, True), RUNS) == []
    assert unmatched_frozen_names(dict.fromkeys([*names, "critik"], False), RUNS) == ["critik"]
    with pytest.raises(ConfigError, match="no model call was recorded"):
        unmatched_frozen_names({"writer": True}, [Trajectory(id="t")])
    many = [Trajectory(id="t", turns=tuple(Turn(node=f"n{i:02}") for i in range(60)))]
    with pytest.raises(ConfigError, match="and 20 more"):
        unmatched_frozen_names({"x": True}, many)

    for trainable in ("writer", ["writer"], {"writer": 1}, {1: True}):
        with pytest.raises(ConfigError, match="expected names of nodes"):
            check_trainable(trainable)  # pyright: ignore[reportArgumentType]


# --- curves ---------------------------------------------------------------------------------------


def test_a_curve_in_text() -> None:
    steps = [fits.record(n, n, n / 10) for n in range(1, 11)]
    evals = [fits.evaluation(mean, at) for mean, at in ((0.0, 0), (0.9, 5), (1.0, 10))]
    lines = text_plot([Curve("lr-1", steps, evals)], 60).splitlines()
    assert lines[0].startswith("    1.000 ┤") and lines[0].endswith("A"), "the last, on top"
    assert lines[14].startswith("    0.000 ┤A") and lines[16].endswith("step 10")
    assert sum(line.count("a") for line in lines[:15]) == 9, "one lies below the last A"
    assert text_plot([Curve("x", [], ())], 40) == "No rewards yet."


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([0.0] * 8, "No run of 8 was rewarded"),
        ([1.0] * 8, "Every run of 8 has the full reward"),
        ([-1.0] * 8, "All 8 runs have the reward -1"),
        ([0.0] * 7 + [0.1], None),
        ([0.0] * 7, None),
    ],
)
def test_runs_that_are_all_worth_the_same(rewards: list[float], words: str | None) -> None:
    warning = all_alike(rewards, len(rewards))
    assert warning is None if words is None else words in (warning or "")
