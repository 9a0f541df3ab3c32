"""How races are compared, how CPU seconds are counted, and which answers TRL's reward reads."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.racing.answers import answers
from benchmarks.racing.plan import Course, Mark, Ratio, Told, best_rate, over
from benchmarks.racing.racer import Racer

TOLD = Told(
    base="base",
    mails="mails.sqlite3",
    scenarios=[2, 0, 1],
    rate=1e-3,
    seed=4,
    steps=6,
    every=3,
    groups=1,
    size=2,
    max_tokens=48,
    max_calls=6,
    tools=[{"type": "function", "function": {"name": "search"}}],
    system="Find it.",
)

#: Twice: 0.6 s of work, half of it a child's; and while it waits, 0.6 s that are not to count.
RACER = """
import subprocess, sys, threading, time
from pathlib import Path
from benchmarks.racing.answers import answers
from benchmarks.racing.plan import Told, say

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def burn_later(step):
    while not (folder / f"heard-{step}").exists():
        time.sleep(0.01)
    burn(0.6)
    (folder / f"burnt-{step}").touch()

CHILD = "import time\\nwhile time.process_time() < 0.3: pass"
folder = Path(sys.argv[1])
told = Told.read(folder)
for step in (told.every, 2 * told.every):
    burn(0.3)
    subprocess.run([sys.executable, "-c", CHILD], check=True)
    threading.Thread(target=burn_later, args=[step], daemon=True).start()
    say(step, folder / str(step), 0.5)
"""


def course(cpu: float, *, rate: float = 1e-3, seed: int = 1, reached: bool = True) -> Course:
    marks = [Mark(3, cpu / 2, 0.4), Mark(9, cpu, 0.8 if reached else 0.6)]
    return Course("trl", rate, seed, marks, reached)


def test_the_best_rate_arrives_with_the_least_cpu() -> None:
    slow, fast = course(20.0, rate=1e-3), course(10.0, rate=3e-3)
    short = course(5.0, rate=1e-2, reached=False)
    assert best_rate([slow, fast, short]) == 3e-3


def test_where_no_rate_arrives_the_best_is_the_one_with_the_highest_reward() -> None:
    low = Course("trl", 1e-3, 0, [Mark(3, 1.0, 0.3), Mark(6, 2.0, 0.31)], reached=False)
    high = Course("trl", 1e-2, 0, [Mark(3, 1.0, 0.5), Mark(6, 2.0, 0.2)], reached=False)
    assert best_rate([low, high]) == 1e-2


def test_a_ratio_is_of_the_sums_over_the_seeds() -> None:
    theirs = [course(30.0, seed=1), course(60.0, seed=2)]
    ours = [course(10.0, seed=1), course(20.0, seed=2)]
    assert over(theirs, ours) == Ratio(3.0, "equal")


@pytest.mark.parametrize(
    ("theirs", "ours", "bound"),
    [
        (False, True, "at least"),
        (True, False, "at most"),
        (False, False, "unknown"),
    ],
)
def test_a_course_that_stops_short_makes_the_ratio_a_bound(
    theirs: bool, ours: bool, bound: str
) -> None:
    assert over([course(4.0, reached=theirs)], [course(2.0, reached=ours)]) == Ratio(2.0, bound)  # pyright: ignore[reportArgumentType]


def test_other_seeds_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"\[2\], expected those of ours, \[1\]"):
        over([course(1.0, seed=2)], [course(1.0, seed=1)])
    with pytest.raises(ValueError, match="expected"):
        over([], [])


def test_a_step_costs_what_lies_between_the_marks() -> None:
    assert course(12.0).per_step == 1.0


def test_a_racer_is_told_what_was_written(tmp_path: Path) -> None:
    TOLD.write(tmp_path)
    assert Told.read(tmp_path) == TOLD


def test_a_racers_children_count_and_its_waiting_does_not(tmp_path: Path) -> None:
    program = tmp_path / "racer.py"
    program.write_text(RACER)
    with Racer([sys.executable, program], tmp_path / "race", TOLD) as racer:
        first = racer.hear()
        (tmp_path / "race" / "heard-3").touch()
        while not (tmp_path / "race" / "burnt-3").exists():
            time.sleep(0.01)
        racer.go()
        second = racer.hear()
    assert (first.step, second.step) == (3, 6)
    assert second.adapter == tmp_path / "race" / "6"
    assert first.cpu >= 0.55  # in ticks of 0.01 s
    assert 0.55 <= second.cpu - first.cpu < 1.1


def test_a_racer_that_ends_says_why(tmp_path: Path) -> None:
    program = tmp_path / "racer.py"
    program.write_text("raise SystemExit('no inbox')")
    with (
        Racer([sys.executable, program], tmp_path / "race", TOLD) as racer,
        pytest.raises(RuntimeError, match="no inbox"),
    ):
        racer.hear()


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "answer", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (call('{"text": "14 March"}'), ["14 March"]),
        (call('{"text": "2 May"}') + "\n" + call('{"text": "3 May"}'), ["2 May", "3 May"]),
        (call('{"date": "14 March"}'), []),
        (call('{"text": 14}'), []),
        (call('"14 March"'), []),
        ('<tool_call>\n{"name": "answer", "arguments": {"text": "14 March"', []),
        ('<tool_call>\n{"name": "search", "arguments": {"query": "answer"}}\n</tool_call>', []),
        ("The answer is 14 March.", []),
    ],
)
def test_an_answer_is_a_well_formed_call(written: str, found: list[str]) -> None:
    assert answers([{"role": "assistant", "content": written}]) == found


def test_what_tools_return_is_no_answer() -> None:
    said = {"role": "tool", "name": "read", "content": call('{"text": "14 March"}')}
    assert answers([said, {"role": "assistant", "content": "No."}]) == []
