"""Learners on several gloo ranks, as a server starts them, against one core in this process.

One learner of two ranks is for all tests that leave it running. It lives in one event loop, so the
tests run in that loop too.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from langchain_art.errors import ArtError, ConfigError, EngineUnavailable, InvalidRequest
from langchain_art.wire import LoraConfig, PreferenceConfig, TrainConfig
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.distributed import rank_zero
from langchain_art_server.backends.peft.distributed.rank_zero import OtherRank, rank_devices
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.learner_cases import (
    FILES,
    LENIENT,
    LORA,
    VOCAB,
    contents,
    folder,
    fresh,
    long_runs,
    make_rows,
    quiet,
)
from tests.support.preference_cases import OfCore, make_pairs, prefer
from tests.support.ranks import (
    check_steps,
    distance,
    gone,
    ignore,
    others,
    ranked,
    started,
)

in_its_loop = pytest.mark.asyncio(loop_scope="module")


#: So many updates that a step of `many` has not ended when its first progress is heard.
LONG = TrainConfig(learning_rate=1e-2, tokens_per_microbatch=64, optimizer_steps=6, **LENIENT)


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `two` makes its temporary folders."""
    return tmp_path_factory.mktemp("temporary")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tiny: str, temporary: Path) -> AsyncIterator[PeftLearner]:
    """A learner of two ranks."""
    async for learner in started(with_folders_in(temporary, ranked(tiny))):
        yield learner


def with_folders_in(temporary: Path, learner: PeftLearner) -> PeftLearner:
    """The learner, whose ranks make their temporary folders there."""
    learner._program._env["TMPDIR"] = str(temporary)
    return learner


@pytest.mark.soak
@pytest.mark.slow
@in_its_loop
async def test_two_ranks_equal_one_after_some_steps(
    two: PeftLearner, tiny: str, tmp_path: Path
) -> None:
    await check_steps(two, tiny, tmp_path)


@pytest.mark.slow
@in_its_loop
async def test_the_pairs_of_a_preference_step_may_be_on_different_ranks(
    two: PeftLearner, tiny: str, tmp_path: Path
) -> None:
    core, restarts = LearnerCore(tiny), two.restarts
    start = alone = together = fresh(core, tmp_path)
    config = PreferenceConfig(learning_rate=1e-2, beta=0.3, tokens_per_microbatch=64)
    for step in (1, 2):  # sides have several rows, then the one pair has a side on each rank
        pairs = make_pairs(5 if step == 1 else 1, seed=step, turns=3 if step == 1 else 1)
        out = folder(tmp_path, f"alone{step}")
        expected = await prefer(OfCore(core), alone, out, step, pairs, config)
        alone, out = out, folder(tmp_path, f"together{step}")
        metrics = await prefer(two, together, out, step, pairs, config)
        together = out
        timed = {"seconds", "save_seconds", "kl_seconds", "cpu_seconds"}
        for name in set(expected) - timed - {"tokens_processed"}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    assert two.restarts == restarts
    assert distance(alone, start, FILES[1]) > 0.05  # they have learned
    assert distance(together, alone, FILES[1]) <= 1e-6


@pytest.mark.slow
async def test_ranks_without_rows_wait_and_ranks_that_are_closed_leave_no_folder(
    tiny: str, tmp_path: Path
) -> None:
    temporary = folder(tmp_path, "temporary")
    core, learner = LearnerCore(tiny), with_folders_in(temporary, ranked(tiny))
    start, rows = fresh(core, tmp_path), make_rows(1)
    expected, out = folder(tmp_path, "expected"), folder(tmp_path, "out")
    config = TrainConfig(learning_rate=1e-2, **LENIENT)
    alone = core.step(LearnerStep(start, expected, 1, rows, config), quiet)
    ranks, begun = list[int](), asyncio.Event()

    async def say(_fraction: float, _message: str) -> None:
        begun.set()

    await learner.start()
    try:
        metrics = await learner.step(LearnerStep(start, out, 1, rows, config), ignore)
        ranks = others(learner.pid)
        cut = LearnerStep(start, folder(tmp_path, "cut"), 1, make_rows(40), LONG)
        task = asyncio.create_task(learner.step(cut, say))
        await begun.wait()
        assert len([*temporary.glob("art-ranks-*/**/rows.npz")]) == 1
    finally:
        await learner.close()
    assert distance(out, expected, FILES[1]) <= 1e-6
    assert metrics["rows"] == 1
    assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-5)  # Adam does not see its scale
    with pytest.raises(EngineUnavailable, match="shut down"):
        await task
    assert len(ranks) == 1
    await gone(ranks)
    assert [*temporary.glob("art-ranks-*")] == []


@pytest.mark.slow
@in_its_loop
async def test_what_one_rank_refuses_all_refuse_and_go_on(
    two: PeftLearner, tiny: str, tmp_path: Path
) -> None:
    core, restarts = LearnerCore(tiny), two.restarts
    start, rows = fresh(core, tmp_path), make_rows(12)
    out, expected = folder(tmp_path, "out"), folder(tmp_path, "expected")
    config = TrainConfig(learning_rate=1e-2, **LENIENT)
    with pytest.raises(ArtError, match="nats apart"):  # from numbers that are all ranks'
        await two.step(LearnerStep(start, out, 1, rows, TrainConfig(learning_rate=2e-5)), ignore)
    with pytest.raises(ConfigError, match="nowhere"):
        await two.step(LearnerStep(tmp_path / "nowhere", out, 1, rows, config), ignore)
    foreign = replace(rows[0], token_ids=[VOCAB] * len(rows[0].mask))
    for bad in ([*rows, foreign], []):
        with pytest.raises(InvalidRequest):
            await two.step(LearnerStep(start, out, 1, bad, config), ignore)
    with pytest.raises(ConfigError, match="q_proj"):
        await two.init_adapter(folder(tmp_path, "none"), LoraConfig(targets=("nonsense",)))
    assert contents(out) == {}
    core.step(LearnerStep(start, expected, 1, rows, config), quiet)
    await two.step(LearnerStep(start, out, 1, rows, config), ignore)
    assert two.restarts == restarts
    assert distance(out, expected, FILES[1]) <= 1e-6


@pytest.mark.slow
@in_its_loop
async def test_ranks_are_in_step_after_one_that_was_cancelled_at_its_end(
    two: PeftLearner, tmp_path: Path
) -> None:
    start, rows, restarts = folder(tmp_path, "start"), long_runs(8, 8, 80), two.restarts
    await two.init_adapter(start, LORA)
    config = TrainConfig(learning_rate=1e-3, **(LENIENT | {"max_kl": 0.02}))
    left, out, last = folder(tmp_path, "left"), folder(tmp_path, "out"), asyncio.Event()

    async def notice(_fraction: float, message: str) -> None:
        index, _, count = message.partition("micro-batch ")[2].partition(" of ")
        if index and index == count:
            last.set()

    task = asyncio.create_task(two.step(LearnerStep(start, left, 1, rows, config), notice))
    await last.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await two.settle()
    await two.step(LearnerStep(start, out, 1, make_rows(6), config), ignore)
    assert contents(left) == {} and two.restarts == restarts


@pytest.mark.slow
@in_its_loop
async def test_a_rank_that_is_killed_takes_the_step_with_it_which_is_begun_again_and_leaves_no_rows(
    two: PeftLearner, temporary: Path, tmp_path: Path
) -> None:
    start, rows, restarts = folder(tmp_path, "start"), make_rows(40), two.restarts
    await two.init_adapter(start, LORA)
    whole, out, seen = folder(tmp_path, "whole"), folder(tmp_path, "out"), list[int]()
    await two.step(LearnerStep(start, whole, 1, rows, LONG), ignore)

    async def kill_once(_fraction: float, _message: str) -> None:
        if not seen:
            seen.append(len([*temporary.glob("art-ranks-*/**/rows.npz")]))
            (out / FILES[1]).write_bytes(b"half a file")
            [other] = others(two.pid)
            os.kill(other, signal.SIGKILL)

    await two.step(LearnerStep(start, out, 1, rows, LONG), kill_once)
    assert two.restarts == restarts + 1 and seen == [1]
    assert contents(out) == contents(whole)
    assert [one.name for one in temporary.glob("art-ranks-*/*")] == ["meeting"]
    assert len(others(two.pid)) == 1  # and the fixture sees that it ends with the learner


@pytest.mark.slow
@in_its_loop
async def test_a_rank_that_cannot_read_its_rows_fails_the_step_and_no_other_waits_for_it(
    two: PeftLearner, temporary: Path, tmp_path: Path
) -> None:
    config, restarts = TrainConfig(learning_rate=1e-2, **LENIENT), two.restarts
    step = LearnerStep(folder(tmp_path, "start"), folder(tmp_path, "out"), 1, make_rows(8), config)
    await two.init_adapter(step.parent, LORA)
    [other] = others(two.pid)
    os.kill(other, signal.SIGSTOP)
    try:
        task = asyncio.create_task(two.step(step, ignore))
        while not (files := [*temporary.glob("art-ranks-*/**/rows.npz")]):
            await asyncio.sleep(0.01)
        files[0].unlink()
    finally:
        os.kill(other, signal.SIGCONT)
    with pytest.raises(ArtError, match=r"Rank 1 .* the rows in rows.npz cannot be read"):
        await task
    assert (await two.step(step, ignore))["rows"] == 8 and two.restarts == restarts


def test_a_rank_that_is_stopped_is_killed_and_rank_0_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, over = threading.Event(), threading.Event()

    def end(_status: int) -> None:
        ended.set()
        over.wait()  # as a process that has ended, which does nothing more

    monkeypatch.setattr(rank_zero, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(rank_zero.os, "_exit", end)
    ours, theirs = socket.socketpair()
    fd = theirs.fileno()
    beat = f"import os, time\nwhile True: os.write({fd}, b'.'); time.sleep(0.01)"
    process = subprocess.Popen([sys.executable, "-c", beat], pass_fds=(fd,))
    theirs.close()
    try:
        assert ours.recv(1)
        OtherRank(1, ours, process).watch(lambda: True)
        assert not ended.wait(0.5), "it beats"
        os.kill(process.pid, signal.SIGSTOP)
        assert ended.wait(60)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        over.set()
        ours.close()


def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert rank_devices(torch.device("cpu"), 2) == ["cpu", "cpu"]
    assert rank_devices(torch.device("cuda"), 2) == ["cuda:0", "cuda:1"]
    assert rank_devices(torch.device("cuda:2"), 2) == ["cuda:2", "cuda:3"]
    with pytest.raises(ConfigError, match="at most 1"):
        rank_devices(torch.device("cuda:3"), 2)
    with pytest.raises(ConfigError, match="at most 1"):
        rank_devices(torch.device("mps"), 2)
