"""Ctrl-C during a fit: a sentence says what to do, and no traceback hides it."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.chat_models import model_of
from tests.support.live_server import LiveServer
from tests.support.trainers import asking, said, trainer_of

FIT = """
import signal, sys
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
trainer.fit_sync(rollout, ['one', 'two'], steps=100, on_step=told, fresh=True)
"""


def test_an_interrupted_fit_ends_with_a_sentence_and_no_traceback(
    art_server: LiveServer, tmp_path: Path
) -> None:
    argv = [sys.executable, "-c", FIT, art_server.base_url]
    with subprocess.Popen(
        argv, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        shown = next((line for line in child.stdout if line == "trained 1\n"), "")
        child.send_signal(signal.SIGINT)
        shown, errors = child.communicate(timeout=120)
    last = " ".join(shown.split())
    assert "of 100. Run the same again" in last, (shown, errors)
    assert last.endswith("go on from there (fit), without fresh=True.")
    assert errors == "" and child.returncode == -signal.SIGINT


def test_in_a_loop_of_the_program_only_the_interrupt_of_the_fit_has_no_traceback(
    art_server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, whose hook is called as the interpreter would at its end."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    trainer = trainer_of(art_server, tmp_path)
    rollout = asking(lambda run, _: run.rng.random(), model_of(art_server, trainer.policy))
    given = [{"id": "one", "question": "one"}]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as ended:
            told = trainer.fit(
                rollout, given, steps=9, on_step=lambda _: signal.raise_signal(signal.SIGINT)
            )
            asyncio.run(told)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Stopped after step 1 of 9. Run the same again" in said(trainer)
    sys.excepthook(ended.type, ended.value, ended.tb)
    assert capsys.readouterr().err == ""
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "KeyboardInterrupt\n"
