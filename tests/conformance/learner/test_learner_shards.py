"""Learners on gloo ranks that hold a part of the base each, against one core with all of it.

One learner of two ranks is for all tests. It lives in one event loop, so they run in that loop too.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire import KLPenalty, LoraConfig, TrainConfig
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.distributed.data_parallel import decoder_layers
from langchain_art_server.backends.peft.distributed.process_group import LOST
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.config import load_settings
from tests.support import forked_start
from tests.support.learner_cases import (
    FILES,
    LENIENT,
    VOCAB,
    folder,
    fresh,
    make_rows,
    quiet,
    shake,
    take,
)
from tests.support.live_server import REPO
from tests.support.ranks import (
    check_a_sampled_step,
    check_steps,
    distance,
    ignore,
    ranked,
    started,
)

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


in_its_loop = pytest.mark.asyncio(loop_scope="module")


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
    shapes = [LoraConfig(rank=4), LoraConfig(rank=2, targets=UPPER)]
    for number, lora in enumerate(shapes):
        rows = prompted(8) if number else make_rows(1)  # one is for one rank
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

    async def leave(_fraction: float, _message: str) -> None:
        raise asyncio.CancelledError

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
