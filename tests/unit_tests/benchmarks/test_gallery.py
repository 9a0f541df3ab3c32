"""What `benchmarks.gallery` makes of the demos' results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gallery
from benchmarks.gallery import Case, cases, change, figures_of, measure, risen, table


def figure(mean: float, ci95: float) -> dict[str, Any]:
    return {"mean": mean, "ci95": ci95, "n": 200}


def result(
    example: str, seed: int, before: float, after: float, control: bool = False
) -> dict[str, Any]:
    return {
        "example": example,
        "seed": seed,
        "control": control,
        "before": figure(before, 0.05),
        "after": figure(after, 0.05),
        "wall_seconds": 100.0 + seed,
        "cpu_seconds": 150.0 + seed,
    }


@pytest.mark.parametrize(
    ("after", "ci95", "clear"),
    [(0.5, 0.1, True), (0.36, 0.1, False), (0.5, 0.4, False), (0.375, 0.0625, False)],
)
def test_a_rise_is_clear_where_the_intervals_do_not_touch(
    after: float, ci95: float, clear: bool
) -> None:
    assert risen(figure(0.25, 0.0625), figure(after, ci95)) is clear


def test_a_fall_is_no_rise() -> None:
    assert not risen(figure(0.5, 0.05), figure(0.1, 0.05))


def test_every_example_has_its_seeds_and_the_control_of_the_first() -> None:
    found = cases(["a-b", "c"], [1, 2])
    assert [case.folder.name for case in found] == [
        *("a-b-seed1", "a-b-seed2", "a-b-control1"),
        *("c-seed1", "c-seed2", "c-control1"),
    ]
    assert found[2].arguments == ["demo", "a-b", "--seed", "1", "--control"]
    assert not any(case.control for case in cases(["a-b"], [1], control=False))


def test_what_is_not_wanted_of_a_result_is_said() -> None:
    assert change(result("a", 0, 0.2, 0.5)) == "0.200 ± 0.050 → 0.500 ± 0.050"
    assert change(result("a", 0, 0.2, 0.3)).endswith("± 0.050 (not clear)")
    assert change(result("a", 0, 0.2, 0.3, control=True)) == "0.200 ± 0.050 → 0.300 ± 0.050"
    assert change(result("a", 0, 0.2, 0.5, control=True)).endswith("± 0.050 (rises)")


def test_the_table_has_a_row_for_each_example_and_leaves_free_what_was_not_run() -> None:
    results = [
        *(result("a", seed, 0.2, 0.5) for seed in (0, 1, 2)),
        result("a", 0, 0.2, 0.0, control=True),
        result("b", 1, 0.1, 0.4),
    ]
    rose, fell = "0.200 ± 0.050 → 0.500 ± 0.050", "0.200 ± 0.050 → 0.000 ± 0.050"
    assert table(results).splitlines() == [
        "| example | seed 0 | seed 1 | seed 2 | control | seconds | CPU seconds |",
        "|---|---|---|---|---|---|---|",
        f"| `a` | {rose} | {rose} | {rose} | {fell} | 101 | 151 |",
        "| `b` |  | 0.100 ± 0.050 → 0.400 ± 0.050 |  |  | 101 | 151 |",
    ]


def test_figures_count_seeds_and_controls_by_themselves() -> None:
    results = [
        result("a", 0, 0.2, 0.5),
        result("a", 1, 0.2, 0.25),
        result("a", 0, 0.2, 0.5, control=True),
    ]
    assert figures_of(results) == pytest.approx(
        {
            "share_risen": 0.5,
            "share_of_controls_risen": 1.0,
            "wall_seconds_max": 101.0,
            "rise_a": 0.175,
        }
    )


def test_cpu_of_processes_that_outlive_the_command_counts() -> None:
    """In a process of its own: it waits for whatever its process has below it."""
    works = "import time\nwhile time.process_time() < 0.5: pass"
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {works!r}])"
    code = (
        "import sys; from benchmarks.gallery import timed; "
        f"print(timed([sys.executable, '-c', {leaves!r}])[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.5


def test_a_result_that_is_there_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "OUT", tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    case = Case("tic-tac-toe", 1)
    with pytest.raises(FileNotFoundError):
        measure(case)
    case.folder.mkdir()
    (case.folder / "summary.json").write_text(json.dumps({"seed": 1, "control": False}))
    with pytest.raises(FileNotFoundError):  # a demo that was stopped begins anew
        measure(case)
    (case.folder / "measured.json").write_text(json.dumps({"wall_seconds": 3.0}))
    assert measure(case) == {
        "example": "tic-tac-toe",
        "seed": 1,
        "control": False,
        "wall_seconds": 3.0,
    }
