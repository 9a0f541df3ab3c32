"""Learners on several gloo ranks, as a server starts them, against one core in this process.

One learner of two ranks is for all tests that leave it running, and one of two ranks that hold a
part of the base each. They live in one event loop, so the tests run in that loop too.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from langchain_art.errors import ArtError, ConfigError, EngineUnavailable, InvalidRequest
from langchain_art.wire import KLPenalty, LoraConfig, PreferenceConfig, TrainConfig
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.distributed import rank_zero
from langchain_art_server.backends.peft.distributed.data_parallel import decoder_layers
from langchain_art_server.backends.peft.distributed.process_group import LOST, interface_towards
from langchain_art_server.backends.peft.distributed.rank_zero import OtherRank, rank_devices
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.ray.engines import learner_place
from langchain_art_server.config import PeftSettings, RaySettings, Settings, load_settings
from tests.support import forked_start
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
    shake,
    take,
)
from tests.support.live_server import REPO, free_port
from tests.support.local_actors import LocalActors
from tests.support.preference_cases import OfCore, make_pairs, prefer
from tests.support.ranks import (
    check_a_sampled_step,
    check_steps,
    distance,
    gone,
    ignore,
    others,
    ranked,
    started,
)
from tests.support.soak import in_soak_alone, share

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
@pytest.mark.parametrize("number", [2, in_soak_alone(3)])
async def test_ranks_without_rows_wait_and_ranks_that_are_closed_in_a_step_leave_no_folder(
    number: int, tiny: str, tmp_path: Path
) -> None:
    temporary, start = folder(tmp_path, "temporary"), folder(tmp_path, "start")
    learner, begun = with_folders_in(temporary, ranked(tiny, number)), asyncio.Event()
    out, expected, rows = folder(tmp_path, "out"), folder(tmp_path, "expected"), make_rows(1)
    config = TrainConfig(learning_rate=1e-2, **LENIENT)

    async def say(_fraction: float, _message: str) -> None:
        begun.set()

    await learner.start()
    try:
        await learner.init_adapter(start, LORA)
        metrics = await learner.step(LearnerStep(start, out, 1, rows, config), ignore)
        ranks = others(learner.pid)
        cut = LearnerStep(start, folder(tmp_path, "cut"), 1, make_rows(40), LONG)
        task = asyncio.create_task(learner.step(cut, say))
        await begun.wait()
        assert len([*temporary.glob("art-ranks-*/**/rows.npz")]) == 1
    finally:
        await learner.close()
    with pytest.raises(EngineUnavailable, match="shut down"):
        await task
    assert len(ranks) == number - 1
    await gone(ranks)
    assert [*temporary.glob("art-ranks-*")] == []
    alone = LearnerCore(tiny).step(LearnerStep(start, expected, 1, rows, config), quiet)
    assert distance(out, expected, FILES[1]) <= 1e-6 and metrics["rows"] == 1
    assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-5)  # Adam does not see its scale


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
@pytest.mark.parametrize("rank", [1, in_soak_alone(0)])  # `test_worker` kills engines alone
@in_its_loop
async def test_a_rank_that_is_killed_takes_the_step_with_it_which_is_begun_again_and_leaves_no_rows(
    rank: int, two: PeftLearner, temporary: Path, tmp_path: Path
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
            os.kill(other if rank else two.pid or 0, signal.SIGKILL)

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


async def test_a_model_that_cannot_be_loaded_stops_the_start(tmp_path: Path) -> None:
    learner = ranked(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere"):
        await learner.start()
    await learner.close()


def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert rank_devices(torch.device("cpu"), 2) == ["cpu", "cpu"]
    assert rank_devices(torch.device("cuda"), 2) == ["cuda:0", "cuda:1"]
    assert rank_devices(torch.device("cuda:2"), 2) == ["cuda:2", "cuda:3"]
    with pytest.raises(ConfigError, match="at most 1"):
        rank_devices(torch.device("cuda:3"), 2)
    with pytest.raises(ConfigError, match="at most 1"):
        rank_devices(torch.device("mps"), 2)


# --- as on several machines of a cluster: by TCP, each rank with files of its own -----------------

CONFIG = TrainConfig(
    learning_rate=1e-2,
    tokens_per_microbatch=64,
    kl=KLPenalty(estimator="k3", coefficient=0.01),
    **LENIENT,
)


def far(model: str, *, shard: bool = False) -> tuple[PeftLearner, LocalActors]:
    chosen = PeftSettings(threads=1, ranks=2, shard=shard)
    settings = Settings(model=model, device="cpu", learner=chosen, ray=RaySettings())
    placed = LocalActors("The learner", actors=2)
    place = learner_place(settings)
    place._placed = placed
    return PeftLearner(settings, place), placed


async def two_steps(learner: PeftLearner, where: Path, reference: Path) -> list[object]:
    """Two steps, the second from the first one, and logprobs: all files and numbers."""
    where.mkdir()
    parent = folder(where, "parent")
    await learner.init_adapter(parent, LORA)
    made: list[object] = []
    for number in (1, 2):
        out, rows = folder(where, f"out{number}"), make_rows(9, seed=number)
        step = LearnerStep(parent, out, number, rows, CONFIG, reference=reference)
        await learner.step(step, ignore)
        parent = out
        made.append(contents(out))
    return [*made, await learner.logprobs(parent, make_rows(5))]


@pytest.mark.slow
@pytest.mark.usefixtures("seats_here")
@pytest.mark.parametrize("shard", [in_soak_alone(False), True])
async def test_files_of_their_own_make_the_same_versions_to_the_bit(
    shard: bool, tiny: str, tmp_path: Path
) -> None:
    near, (there, placed) = ranked(tiny, shard=shard), far(tiny, shard=shard)
    reference = folder(tmp_path, "reference")
    found: list[list[object]] = []
    for learner in (near, there):
        await learner.start()
        try:
            if learner is near:
                await near.init_adapter(reference, LORA.model_copy(update={"seed": 7}))
            found.append(await two_steps(learner, tmp_path / f"of {len(found)}", reference))
            assert learner.restarts == 0
        finally:
            await learner.close()
    assert found[0] == found[1]
    for host in placed.hosts:  # none outlives its connection
        assert host._process is not None
        await asyncio.wait_for(asyncio.to_thread(host._process.wait), 30)


@pytest.mark.slow
@pytest.mark.usefixtures("seats_here")
async def test_ranks_refuse_together_what_is_not_there_and_begin_again_when_one_is_killed(
    tiny: str, tmp_path: Path
) -> None:
    learner, placed = far(tiny)
    start, whole, out, empty = (
        folder(tmp_path, name) for name in ("start", "whole", "out", "empty")
    )
    rows, killed = make_rows(40), list[int]()

    async def kill_once(_fraction: float, _message: str) -> None:
        process = placed.hosts[1]._process
        if not killed and process is not None and process.pid is not None:
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    await learner.start()
    try:
        await learner.init_adapter(start, LORA)
        with pytest.raises(ConfigError, match=r"adapter_model\.safetensors is missing"):
            await learner.step(LearnerStep(empty, out, 1, rows, CONFIG), ignore)
        await learner.step(LearnerStep(start, whole, 1, rows, CONFIG), ignore)
        assert learner.restarts == 0
        await learner.step(LearnerStep(start, out, 1, rows, CONFIG), kill_once)
        assert killed and learner.restarts == 1
        assert contents(out) == contents(whole)
    finally:
        await learner.close()


@pytest.mark.slow
@pytest.mark.usefixtures("seats_here")
async def test_a_rank_that_cannot_be_reached_stops_the_start(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, placed = far(tiny)
    start = placed.hosts[1].start
    monkeypatch.setattr(
        placed.hosts[1], "start", lambda *given: start(*given)._replace(port=free_port())
    )
    with pytest.raises(EngineUnavailable, match="of a node does not answer"):
        await learner.start()
    await learner.close()


@pytest.mark.slow
@pytest.mark.usefixtures("seats_here")
def test_the_interface_is_the_one_that_the_host_is_reached_by() -> None:
    loopback = interface_towards("127.0.0.1")
    assert loopback in ("lo", "lo0")
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                assert interface_towards(one.address) in (name, loopback)


# --- ranks that hold a part of the base each -----------------------------------------------------

#: Nothing below the second layer learns: gradients end there.
UPPER = ("layers.1.self_attn.v_proj", "layers.1.mlp.down_proj")


def prompted(count: int) -> list[Row]:
    """Rows below one long prompt: a part of the forest that gets gradients by its keys alone."""
    prompt = [(7 * at) % VOCAB for at in range(90)]
    zeros = [0.0] * len(prompt)
    return [
        replace(
            row,
            token_ids=prompt + row.token_ids,
            mask=[0] * len(prompt) + row.mask,
            logprobs=zeros + row.logprobs,
            advantages=zeros + row.advantages,
        )
        for row in make_rows(count)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shards(tiny: str) -> AsyncIterator[PeftLearner]:
    """A learner of two ranks with half of the base each."""
    async for learner in started(ranked(tiny, shard=True)):
        yield learner


@pytest.mark.soak
@pytest.mark.slow
@in_its_loop
async def test_two_shards_equal_one_whole_after_some_steps(
    shards: PeftLearner, tiny: str, tmp_path: Path
) -> None:
    # Small micro-batches of long and short rows, so that the ranks have different numbers of them.
    await check_steps(shards, tiny, tmp_path, tokens_per_microbatch=64)


@pytest.mark.slow
@in_its_loop
async def test_shards_sample_their_rows_in_as_many_passes(
    shards: PeftLearner, tiny: str, tmp_path: Path
) -> None:
    await check_a_sampled_step(shards, tiny, tmp_path)


@pytest.mark.slow
@in_its_loop
async def test_shards_take_other_shapes_and_ranks_without_rows(
    shards: PeftLearner, tiny: str, tmp_path: Path
) -> None:
    core, learner, restarts = LearnerCore(tiny), shards, shards.restarts
    config = TrainConfig(
        learning_rate=1e-2,
        kl=KLPenalty(estimator="k3", coefficient=0.01),
        tokens_per_microbatch=64,
        **LENIENT,
    )
    shapes = [LoraConfig(rank=2, targets=UPPER), LoraConfig(rank=4)]
    for number, lora in enumerate(shapes):
        rows = prompted(8) if number else make_rows(1, seed=1)  # one is for one rank
        start = folder(tmp_path, f"start{number}")
        await learner.init_adapter(start, lora)
        out, expected = (folder(tmp_path, f"{name}{number}") for name in ("out", "expected"))
        core.step(LearnerStep(shake(start), expected, 1, rows, config), quiet)
        metrics = await learner.step(LearnerStep(start, out, 1, rows, config), ignore)
        assert metrics["rows"] == len(rows)
        assert distance(out, expected, FILES[1]) <= 1e-6
        found = await learner.logprobs(out, make_rows(5))
        whole = core.logprobs(out, make_rows(5))
        np.testing.assert_allclose(np.concatenate(found), np.concatenate(whole), atol=1e-5)
    # A teacher has another shape yet. Float32 alone takes them up to 5e-6 apart: Adam's first step
    # divides gradients near 0 by their size (in float64, 2e-15).
    teacher = shake(fresh(core, tmp_path, LoraConfig(rank=8, alpha=4.0)), scale=0.1)
    taught = LearnerStep(start, folder(tmp_path, "taught"), 1, rows, config, reference=teacher)
    alone = core.step(replace(taught, out=folder(tmp_path, "alone")), quiet)
    metrics = await learner.step(taught, ignore)
    assert metrics["kl_reference"] == pytest.approx(alone["kl_reference"], rel=1e-4)
    assert distance(tmp_path / "taught", tmp_path / "alone", FILES[1]) <= 2e-5
    assert learner.restarts == restarts


@pytest.mark.slow
@in_its_loop
async def test_shards_refuse_together_and_go_on(
    shards: PeftLearner, tiny: str, tmp_path: Path
) -> None:
    core, learner, restarts = LearnerCore(tiny), shards, shards.restarts
    start, rows = shake(fresh(core, tmp_path)), make_rows(24)
    out, expected = folder(tmp_path, "out"), folder(tmp_path, "expected")
    config = TrainConfig(learning_rate=1e-2, tokens_per_microbatch=64, **LENIENT)
    request = LearnerStep(start, out, 1, rows, config)
    core.step(LearnerStep(start, expected, 1, rows, config), quiet)

    killed: list[int] = []

    async def leave(_fraction: float, _message: str) -> None:
        raise asyncio.CancelledError

    async def kill_once(_fraction: float, _message: str) -> None:
        if not killed:
            killed.extend(others(learner.pid))
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(ArtError, match="nats apart"):  # rank 0 looks into it, rank 1 assists
        await learner.step(
            LearnerStep(start, out, 1, rows, TrainConfig(learning_rate=2e-5)), ignore
        )
    with pytest.raises(ConfigError, match="nowhere"):
        await learner.logprobs(tmp_path / "nowhere", rows)
    with pytest.raises(asyncio.CancelledError):
        await learner.step(request, leave)
    await learner.step(request, ignore)
    assert distance(out, expected, FILES[1]) <= 1e-6
    assert learner.restarts == restarts
    if not share():  # ranks with the whole base are killed above
        return
    await learner.step(request, kill_once)
    if learner.restarts == restarts:  # on a busy machine, the step had ended before it was told
        await learner.step(request, ignore)
    assert killed and learner.restarts == restarts + 1
    assert distance(out, expected, FILES[1]) <= 1e-6


@pytest.mark.slow
def test_a_shard_is_half_of_the_layers_and_its_layers_may_be_computed_twice(
    tiny: str, tmp_path: Path
) -> None:
    core, rows = LearnerCore(tiny), make_rows(12)
    start, expected = shake(fresh(core, tmp_path)), folder(tmp_path, "expected")
    outs = [folder(tmp_path, f"rank{rank}") for rank in range(2)]
    where, logs = [str(tmp_path / "meeting"), tiny, str(start)], [tmp_path / "0", tmp_path / "1"]
    ranks = [
        forked_start.start(
            "tests.support.shard_rank",
            [str(rank), *where, str(out)],
            {**os.environ},
            REPO,
            logs[rank],
        )
        for rank, out in enumerate(outs)
    ]
    ended = [rank.wait() for rank in ranks]
    said = [log.read_text().partition('{"held"') for log in logs]
    found: list[dict[str, Any]] = [json.loads(b + c.partition("\n")[0]) for _, b, c in said]
    layers = decoder_layers(core.base)
    whole = sum(
        p.numel() for layer in layers for n, p in layer.named_parameters() if "lora" not in n
    )
    for rank in found:
        assert rank["held"] == pytest.approx(whole / 2, rel=0.01)
        assert rank["gathered"] == 0  # nothing of the other's is left behind a step
    measured = core.packer._measured()  # pyright: ignore[reportPrivateUsage]
    assert ended == [LOST, LOST]  # after what fails on one of them
    for rank in found:
        assert rank["bytes_per_token"] == pytest.approx(measured, rel=0.2)
    assert [rank["checkpointed"] for rank in found] == [1.0, 0.0]
    take(core, start, expected, rows)
    assert distance(outs[0], expected, FILES[1]) <= 1e-6


def test_settings_that_no_learner_can_have_are_refused() -> None:
    for learner, words in (
        ({"shard": True}, "got shard=true with ranks=1"),
        ({"shard": True, "ranks": 2, "kind": "unsloth"}, "kind='unsloth'"),
        ({"kind": "unsloth", "ranks": 2}, "got ranks=2.*expected it with kind='peft'"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_settings(model="m", learner=learner)
