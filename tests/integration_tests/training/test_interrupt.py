"""Ctrl-C during a fit: a sentence says what to do, and no traceback hides it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.live_server import LiveServer

FIT = """
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # below `nohup` it would be ignored
from langchain_art import ChatART, TrainConfig, Trainer, capture
model = ChatART(model="interrupted", base_url=sys.argv[1], max_tokens=8)
async def rollout(question):
    async with capture(scenario=question) as run:
        run.reward = float("a" in (await model.ainvoke(question)).text)
    return run
trainer = Trainer(model, group_size=4, groups_per_step=1, out_dir="fit")
def told(record):
    print("trained", record.step, flush=True)
"""
SYNC = "trainer.fit_sync(rollout, ['one', 'two'], steps=100, on_step=told{fresh})"
ASYNC = "asyncio.run(trainer.fit(rollout, ['one', 'two'], steps=100, on_step=told{fresh}))"


@pytest.mark.parametrize(("call", "fresh"), [(SYNC, True), (ASYNC, False)])
def test_an_interrupted_fit_ends_with_a_sentence_and_no_traceback(
    art_server: LiveServer, tmp_path: Path, call: str, fresh: bool
) -> None:
    script = FIT + call.format(fresh=", fresh=True" if fresh else "")
    argv = [sys.executable, "-c", script, art_server.base_url]
    with subprocess.Popen(
        argv, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        shown = next((line for line in child.stdout if line == "trained 1\n"), "")
        child.send_signal(signal.SIGINT)
        shown, errors = child.communicate(timeout=120)
    last = " ".join(shown.split())
    assert "of 100. Run the same again" in last, (shown, errors)
    assert last.endswith("go on from there (fit), without fresh=True." if fresh else "(fit).")
    assert errors == "" and child.returncode == -signal.SIGINT


def test_another_interrupt_has_its_traceback(art_server: LiveServer, tmp_path: Path) -> None:
    call = "trainer.fit_sync(rollout, ['one'], steps=1)\nraise KeyboardInterrupt"
    argv = [sys.executable, "-c", FIT + call, art_server.base_url]
    done = subprocess.run(argv, cwd=tmp_path, text=True, capture_output=True, timeout=300)
    assert "Traceback" in done.stderr and done.stderr.endswith("KeyboardInterrupt\n")
