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
from langchain_art.analytics.analysis import error_patterns, normalised, version_of
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
    found = [(one.action, one.count, one.share) for one in analyze(RUNS).actions]
    assert found == [("(answer)", 4, pytest.approx(2 / 3)), ("search", 2, pytest.approx(1 / 3))]
    # Runs without a scenario are of their own.
    (alone,) = analyze(
        [run(f"{i}", float(i % 2), turn(), scenario=None) for i in range(4)]
    ).versions
    assert (alone.scenarios, alone.reward_ci95) == (4, pytest.approx(Z95 * (1 / 3) ** 0.5 / 2))


def test_nodes_have_latency_tokens_and_errors() -> None:
    old, new = analyze(RUNS).nodes
    assert (old.node, old.model, old.calls, old.errors) == ("agent", "p@1", 5, 1)
    assert (old.latency_p50, old.latency_p95) == (2.0, 2.0)
    assert (new.calls, new.excluded, new.prompt_tokens) == (2, 1, 200)
    latencies = [run(f"t{n}", 1.0, turn(latency=float(n))) for n in range(1, 102)]
    (node,) = analyze(latencies).nodes
    assert (node.latency_p50, node.latency_p95) == (51.0, 96.0)


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


def test_a_number_that_makes_no_sense_is_refused() -> None:
    for name, wrong in (("success", math.nan), ("gpu_rate", math.inf), ("gpu_rate", -1)):
        with pytest.raises(ConfigError, match=f"got {name}={wrong}"):
            analyze([], **{name: wrong})


def test_the_tables_fit_a_terminal(tmp_path: Path) -> None:
    found = analyze(RUNS, gpu_rate=2.0)
    few = compare(versions({"a": [0.0], "b": [0.0]}, {"a": [1.0], "b": [1.0]}), "p@0", "p@9")
    text = shown(analysis_view(found, [few]))
    assert max(map(len, text.splitlines())) <= 80
    for words in ("p@10", "0.33", "0.06-0.79", "search", "33%", "boom <n>", "4, 1 failed"):
        assert words in text, words
    assert "Fewer than 6 pairs cannot be significant" in text
    assert shown(analysis_view(analyze([])))
    text = shown(analysis_view(analyze([run("a", 1.0, turn(usage=None))])))
    assert "- + -" in text and "0 + 0" not in text, "tokens that nobody told"
    alike = analyze([run(f"{i}", 0.0, turn()) for i in range(10)])
    assert analysis_plot(alike, tmp_path / "runs.svg").exists()


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "pattern"),
    [
        ("Timeout after 31 s at 'mail-7'", "Timeout after <n> s at <text>"),
        ("no file /home/ann/a.txt\n  here", "no file <path> here"),
        ("call_Ab12Cd34Ef failed at 0x7f3a91", "<id> failed at <id>"),
        ("run 3f2504e0-4f89-41d3-9a0c-0305e82c3301", "run <id>"),
        ("digest 9a0c0305e82c3301 differs", "digest <id> differs"),
        ("GET https://h.example/v1?k=3 gave 503", "GET <url> gave <n>"),
        ("got -1.5e-3, expected a word like added", "got <n>, expected a word like added"),
        ("api_key=abcdef123456 is wrong", "[redacted] is wrong"),
    ],
)
def test_what_differs_from_run_to_run_is_left_out(message: str, pattern: str) -> None:
    assert normalised(message) == pattern
    assert len(normalised("word " * 100)) == 161


def answered(id_: str, text: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def test_errors_are_grouped_by_what_they_say() -> None:
    runs = [
        Trajectory(id="a", status="failed", error="ValueError: got 3"),
        Trajectory(
            id="b",
            error="ValueError: got 44",
            turns=(
                turn(tool="search"),
                Turn(node="agent", extends=0, messages=(answered("x", "Error: no mail 7"),)),
                # The whole prompt again, as of a summarising graph: the same result.
                Turn(node="sum", messages=(answered("x", "Error: no mail 7"),), error="429 from x"),
                Turn(
                    node="agent",
                    messages=(answered("c2", "Error handling: errors are fine, and 0 Error: s"),),
                ),
            ),
        ),
    ]
    found = [
        (one.where, one.name, one.pattern, one.count, one.runs, one.example)
        for one in error_patterns(runs)
    ]
    assert found == [
        ("run", "-", "ValueError: got <n>", 2, 2, "a"),
        ("tool", "search", "Error: no mail <n>", 1, 1, "b"),
        ("call", "sum", "<n> from x", 1, 1, "b"),
    ]
