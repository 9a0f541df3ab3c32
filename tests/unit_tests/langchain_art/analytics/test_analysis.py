"""Figures of runs against values worked out by hand."""

import io
import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from langchain_art.analytics import analyze, compare
from langchain_art.analytics.analysis import version_of
from langchain_art.analytics.report import analysis_plot, analysis_view
from langchain_art.errors import ConfigError
from langchain_art.statistics.costs import busy_seconds, in_order
from langchain_art.statistics.intervals import Z95, wilson
from langchain_art.wire import Trajectory, Turn, Usage

DAY = datetime(2026, 6, 1, tzinfo=UTC).timestamp()


def turn(model: str = "p@1", *, tool: str | None = None, **more: Any) -> Turn:
    call = {"id": "x", "type": "function", "function": {"name": tool, "arguments": "{}"}}
    reply = {"role": "assistant", "content": "hi"} | ({"tool_calls": [call]} if tool else {})
    given: dict[str, Any] = {
        "node": "agent",
        "model": model,
        "reply": reply,
        "usage": Usage(prompt_tokens=100, completion_tokens=10),
        "started_at": DAY,
        "latency": 2.0,
    }
    return Turn(**(given | more))


def run(name: str, reward: float | None, *turns: Turn, **more: Any) -> Trajectory:
    return Trajectory(id=name, reward=reward, turns=turns, **({"scenario": name} | more))


RUNS = [
    run("a", 1.0, turn(tool="search"), turn(started_at=DAY + 1)),
    run("b", 0.25, turn(tool="search", started_at=DAY + 100), scenario="a"),
    run("c", None, turn(started_at=DAY + 100, error="boom 3"), status="failed", error="boom 4"),
    run("d", None, turn(started_at=None, latency=None)),
    run("e", 0.5, turn("p@10"), turn("p@10", excluded_because="retried"), scenario=None),
]


def test_a_version_is_counted_by_hand() -> None:
    first, second = analyze(RUNS).versions
    assert (first.version, second.version) == ("p@1", "p@10")
    assert (first.runs, first.failed, first.unscored, first.scenarios) == (4, 1, 1, 3)
    assert (first.successes, first.success_rate) == (1, pytest.approx(1 / 3))
    assert (first.success_low, first.success_high) == wilson(1, 3)
    assert first.reward_mean == 0.625
    assert first.reward_ci95 is None, "the scored runs are of one scenario"
    assert (first.prompt_tokens, first.completion_tokens) == (500, 50)
    assert first.calls_mean == 1.25
    assert second.success_rate == 1.0 and analyze(RUNS, success=0.6).versions[1].successes == 0


def test_runs_without_a_scenario_are_of_their_own() -> None:
    loose = [run(f"r{i}", float(i % 2), turn(), scenario=None) for i in range(4)]
    (found,) = analyze(loose).versions
    assert found.scenarios == 4
    assert found.reward_ci95 == pytest.approx(Z95 * (1 / 3) ** 0.5 / 2)


def test_nodes_have_latency_tokens_and_errors() -> None:
    old, new = analyze(RUNS).nodes
    assert (old.node, old.model, old.calls, old.errors) == ("agent", "p@1", 5, 1)
    assert (old.latency_p50, old.latency_p95) == (2.0, 2.0)
    assert (new.calls, new.excluded, new.prompt_tokens) == (2, 1, 200)
    latencies = [run(f"t{n}", 1.0, turn(latency=float(n))) for n in range(1, 102)]
    (node,) = analyze(latencies).nodes
    assert (node.latency_p50, node.latency_p95) == (51.0, 96.0)


def test_actions_are_the_tools_of_the_replies_that_were_kept() -> None:
    found = [(one.action, one.count, one.share) for one in analyze(RUNS).actions]
    assert found == [("(answer)", 4, pytest.approx(2 / 3)), ("search", 2, pytest.approx(1 / 3))]


def test_a_version_is_that_of_the_models_that_are_ours() -> None:
    both = run("r", 1.0, turn("w@2"), turn("c@1"), turn("gpt-4o-mini", ours=False))
    assert version_of(both) == "c@1 + w@2"
    assert version_of(run("r", 1.0, turn("gpt-4o-mini", ours=False))) == "gpt-4o-mini"
    assert version_of(run("r", 1.0)) == "-"
    assert sorted(["p@10", "p@9", "a@2"], key=in_order) == ["a@2", "p@9", "p@10"]


def test_overlapping_calls_are_busy_once() -> None:
    spans = [(0.0, 4.0), (1.0, 2.0), (3.0, 3.0), (10.0, 1.0)]
    turns = [turn(started_at=at, latency=seconds) for at, seconds in spans]
    assert busy_seconds(turns) == 7.0
    assert busy_seconds([turn(ours=False), turn(latency=None)]) == 0.0


def test_our_calls_share_the_servers_time_and_hosted_ones_have_list_prices() -> None:
    turns = [turn(latency=1.0), turn(latency=3.0), turn("gpt-4o-mini", ours=False, node="judge")]
    found = analyze([run("a", 1.0, *turns)], gpu_rate=7.2)
    ours, judge = found.nodes
    assert found.busy_seconds == 3.0
    assert ours.cost_usd == pytest.approx(3.0 / 3600 * 7.2)
    assert judge.cost_usd == pytest.approx((100 * 0.15 + 10 * 0.6) / 1e6)  # OpenAI's list price
    assert found.versions[0].cost_usd == pytest.approx(0.006 + 21e-6)
    assert analyze([run("a", 1.0, *turns)]).nodes[0].cost_usd is None, "no rate, no cost"


def test_what_has_no_price_is_counted_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [turn("nobodys-model", ours=False), turn("gpt-4o-mini", ours=False, usage=None)]
    found = analyze([run("a", 1.0, *turns)])
    assert [one.unpriced for one in found.nodes] == [1, 1]
    assert "nobodys-model (1 calls), gpt-4o-mini (1 calls)" in found.notes[0]
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    monkeypatch.setattr("langchain_art.statistics.costs.find_spec", lambda name: None)
    assert "pip install 'langchain-art[prices]'" in analyze([run("a", 1.0, *turns)]).notes[0]


def versions(before: dict[str, list[float]], after: dict[str, list[float]]) -> list[Trajectory]:
    return [
        run(f"{model}-{name}-{i}", reward, turn(model), scenario=name)
        for model, rewards in (("p@0", before), ("p@9", after))
        for name, given in rewards.items()
        for i, reward in enumerate(given)
    ]


def test_shared_scenarios_are_compared_in_pairs() -> None:
    before = {f"s{i}": [i / 10, i / 10 + 0.1] for i in range(8)} | {"old": [0.9]}
    after = {f"s{i}": [i / 10 + 0.2] for i in range(8)}
    found = compare(versions(before, after), "p@0", "p@9")
    assert (found.paired, found.scenarios, found.left_out) == (True, 8, 1)
    assert found.difference == pytest.approx(0.15)
    assert found.ci95 == pytest.approx(0.0, abs=1e-12)
    assert found.p_value == 2 / 2**8 and found.significant
    assert "p@0 → p@9: +0.150" in str(found) and "paired sign-flip permutation test" in str(found)


def test_others_are_compared_without_pairs() -> None:
    before = {f"x{i}": [float(i % 2)] for i in range(6)}
    after = {f"y{i}": [1.0] for i in range(6)}
    found = compare(versions(before, after), "p@0", "p@9")
    assert (found.paired, found.scenarios, found.difference) == (False, 12, 0.5)
    assert found.ci95 == pytest.approx(Z95 * (0.3 / 6) ** 0.5)
    assert not found.significant
    with pytest.raises(ConfigError, match=r"got the version 'p@8'.*their versions: p@0, p@9"):
        compare(versions(before, after), "p@0", "p@8")


def shown(view: Any) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("runs", "reward"), [(0, 0.0), (10, 0.0), (13, 1.0)])
def test_a_plot_of_runs_that_are_all_alike(tmp_path: Path, runs: int, reward: float) -> None:
    found = analyze([run(f"{i}", reward, turn()) for i in range(runs)])
    assert analysis_plot(found, tmp_path / "runs.svg").exists()


def test_a_number_that_makes_no_sense_is_refused() -> None:
    for name, wrong in (("success", math.nan), ("gpu_rate", math.inf), ("gpu_rate", -1)):
        with pytest.raises(ConfigError, match=f"got {name}={wrong}"):
            analyze([], **{name: wrong})


def test_the_tables_fit_a_terminal() -> None:
    found = analyze(RUNS, gpu_rate=2.0)
    few = compare(versions({"a": [0.0], "b": [0.0]}, {"a": [1.0], "b": [1.0]}), "p@0", "p@9")
    text = shown(analysis_view(found, [few]))
    assert max(map(len, text.splitlines())) <= 80
    for words in ("p@10", "0.33", "0.06-0.79", "search", "33%", "boom <n>", "4, 1 failed"):
        assert words in text, words
    assert "Fewer than 6 pairs cannot be significant" in text
    assert shown(analysis_view(analyze([])))


def test_tokens_that_nobody_told_are_not_shown_as_none() -> None:
    text = shown(analysis_view(analyze([run("a", 1.0, turn(usage=None))])))
    assert "- + -" in text and "0 + 0" not in text
