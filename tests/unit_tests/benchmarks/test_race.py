"""How races are compared, how CPU seconds are counted, and which answers TRL's reward reads."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.racing.plan import Told
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
