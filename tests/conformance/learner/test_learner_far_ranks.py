"""Ranks of the learner as on several machines of a cluster: by TCP, each with files of its own."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from langchain_art.errors import ConfigError, EngineUnavailable
from langchain_art.wire import KLPenalty, TrainConfig
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.distributed.process_group import interface_towards
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.ray.engines import learner_place
from langchain_art_server.config import PeftSettings, RaySettings, Settings
from tests.support.learner_cases import LENIENT, LORA, contents, folder, make_rows
from tests.support.live_server import free_port
from tests.support.local_actors import LocalActors
from tests.support.ranks import ignore, ranked

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("seats_here")]
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


async def test_files_of_their_own_make_the_same_versions_to_the_bit(
    tiny: str, tmp_path: Path
) -> None:
    near, (there, placed) = ranked(tiny, shard=True), far(tiny, shard=True)
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


def test_the_interface_is_the_one_that_the_host_is_reached_by() -> None:
    loopback = interface_towards("127.0.0.1")
    assert loopback in ("lo", "lo0")
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                assert interface_towards(one.address) in (name, loopback)
