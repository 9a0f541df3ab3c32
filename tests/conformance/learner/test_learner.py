"""What any `Learner` must do, in this process and through its child's, on tiny random models."""

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from langchain_art.errors import ArtError, ConfigError, InvalidRequest
from langchain_art.wire import LoraConfig, TrainConfig
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.config import PeftSettings, Settings
from tests.support.learner_cases import (
    FILES,
    LENIENT,
    LORA,
    VOCAB,
    contents,
    folder,
    fresh,
    make_rows,
    quiet,
    take,
)
from tests.support.ranks import ignore


def test_a_zero_advantage_changes_nothing_even_with_momentum(tiny: str, tmp_path: Path) -> None:
    core = LearnerCore(tiny)
    start, rows = fresh(core, tmp_path), make_rows(6)
    silent = [replace(row, advantages=[0.0] * len(row.mask)) for row in rows]
    one, two, three = (folder(tmp_path, name) for name in ("one", "two", "three"))
    take(core, start, one, rows)
    metrics = take(core, one, two, silent, step=2, optimizer_steps=3)
    assert contents(two) == contents(one)
    assert contents(one)[FILES[1]] != contents(start)[FILES[1]]
    assert metrics["grad_norm"] == 0.0 and metrics["loss"] == 0.0
    take(core, start, three, silent)
    assert contents(three)[FILES[1]] == contents(start)[FILES[1]]


def test_a_fresh_adapter_equals_the_base_and_its_seed_decides_it(tiny: str, tmp_path: Path) -> None:
    core = LearnerCore(tiny)
    rows = make_rows(5, low=1)
    zero, again = fresh(core, tmp_path), fresh(core, tmp_path)
    other = fresh(core, tmp_path, LORA.model_copy(update={"seed": 1}))
    for own, base in zip(core.logprobs(zero, rows), core.logprobs(None, rows), strict=True):
        assert own.tolist() == base.tolist()
        assert own[0] == 0.0
    assert contents(zero) == contents(again)
    assert contents(zero)[FILES[1]] != contents(other)[FILES[1]]
    assert sorted(contents(zero)) == sorted(FILES[:2])
    config = json.loads((zero / FILES[0]).read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8 and config["bias"] == "none"
    assert config["base_model_name_or_path"] == tiny
    assert sorted(config["target_modules"]) == config["target_modules"]
    assert "lm_head" not in config["target_modules"] and len(config["target_modules"]) == 7
    first = load_file(zero / FILES[1])
    a = [tensor for name, tensor in first.items() if "lora_A" in name]
    # Kaiming-uniform with a = √5 is uniform in ±1/√fan_in.
    assert len(a) == 14 and all(0.9 < t.abs().max() * math.sqrt(t.shape[1]) <= 1.0 for t in a)


def test_save_and_load_reproduce_logprobs_exactly_here_and_in_peft(
    tiny: str, tmp_path: Path
) -> None:
    core = LearnerCore(tiny)
    start, rows = fresh(core, tmp_path), make_rows(6)
    out = folder(tmp_path, "out")
    take(core, start, out, rows)
    held = core.logprobs(out, rows)
    loaded = LearnerCore(tiny).logprobs(out, rows)
    assert [h.tolist() for h in held] == [x.tolist() for x in loaded]
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, str(out)).eval()
    for row, own in zip(rows, held, strict=True):
        with torch.no_grad():
            logits_TV = model(torch.tensor([row.token_ids])).logits[0, :-1]
        theirs_T = logits_TV.log_softmax(-1)[range(len(own) - 1), row.token_ids[1:]]
        assert own[1:].tolist() == pytest.approx(theirs_T.tolist(), abs=1e-5)
    assert any(
        own.tolist() != b.tolist() for own, b in zip(held, core.logprobs(None, rows), strict=True)
    )


# --- the child process --------------------------------------------------------------------------


def learner_for(model: str) -> PeftLearner:
    return PeftLearner(Settings(model=model, device="cpu", learner=PeftSettings(threads=1)))


in_its_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def learner(tiny: str) -> AsyncIterator[PeftLearner]:
    """One child for the tests that leave it running. It lives in one event loop, as they do."""
    made = learner_for(tiny)
    await made.start()
    yield made
    await made.close()


@pytest.mark.slow
@in_its_loop
async def test_a_child_that_is_killed_in_the_middle_loses_nothing(
    learner: PeftLearner, tiny: str, tmp_path: Path
) -> None:
    core, rows = LearnerCore(tiny), make_rows(40)
    # So many updates that the step has not ended when its first progress is heard.
    config = TrainConfig(
        learning_rate=1e-2, tokens_per_microbatch=64, optimizer_steps=16, **LENIENT
    )
    start, expected = fresh(core, tmp_path), folder(tmp_path, "expected")
    core.step(LearnerStep(start, expected, 1, rows, config), quiet)
    restarts = learner.restarts
    here = folder(tmp_path, "here")
    await learner.init_adapter(here, LORA)
    assert contents(here) == contents(start)
    out, seen = folder(tmp_path, "out"), []

    async def kill_once(fraction: float, message: str) -> None:
        if not seen:
            assert (out / "rows.npz").exists()
            (out / FILES[1]).write_bytes(b"half a file")
            os.kill(learner.pid or 0, signal.SIGKILL)
        seen.append(fraction)

    metrics = await learner.step(LearnerStep(here, out, 1, rows, config), kill_once)
    assert learner.restarts == restarts + 1
    assert contents(out) == contents(expected)  # and nothing else: the rows are gone
    assert metrics["rows"] == 40 and max(seen) == seen[-1] < 1.0  # 1 is for what has ended
    assert seen.count(seen[0]) == 2
    got = await learner.logprobs(out, rows)
    assert got == [p.tolist() for p in core.logprobs(expected, rows)]
    base = await learner.logprobs(None, rows[:1])
    assert base == [p.tolist() for p in core.logprobs(None, rows[:1])]


@pytest.mark.slow
@in_its_loop
async def test_refusals_and_cancelled_steps_leave_the_child_in_order(
    learner: PeftLearner, tiny: str, tmp_path: Path
) -> None:
    rows, restarts = make_rows(40), learner.restarts
    config = TrainConfig(
        learning_rate=1e-2, tokens_per_microbatch=64, optimizer_steps=16, **LENIENT
    )
    start, out = folder(tmp_path, "start"), folder(tmp_path, "out")
    with pytest.raises(ConfigError, match="q_proj"):
        await learner.init_adapter(start, LoraConfig(targets=("nonsense",)))
    await learner.init_adapter(start, LORA)
    foreign = replace(rows[0], token_ids=[VOCAB] * len(rows[0].mask))
    empty = Row([], [], [], [])
    for bad in ([*rows, foreign], [empty], []):
        with pytest.raises(InvalidRequest):
            await learner.step(LearnerStep(start, out, 1, bad, config), ignore)
        with pytest.raises(InvalidRequest):
            await learner.logprobs(start, bad)
    wild = replace(
        rows[0],
        logprobs=[-1000.0 * m for m in rows[0].mask],
        advantages=[-1.0 * m for m in rows[0].mask],
    )
    with pytest.raises(ArtError, match="nats apart"):
        await learner.step(
            LearnerStep(start, out, 1, [wild], TrainConfig(learning_rate=2e-5)), ignore
        )
    assert contents(out) == {}

    begun = asyncio.Event()

    async def notice(_fraction: float, _message: str) -> None:
        begun.set()

    left = folder(tmp_path, "left")
    task = asyncio.create_task(learner.step(LearnerStep(start, left, 1, rows, config), notice))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    whole = TrainConfig(learning_rate=1e-2, **LENIENT)
    await learner.step(LearnerStep(start, out, 1, rows, whole), ignore)
    assert contents(left) == {}  # it stopped in the middle, long before this step began
    core, expected = LearnerCore(tiny), folder(tmp_path, "expected")
    core.step(LearnerStep(start, expected, 1, rows, whole), quiet)
    assert contents(out) == contents(expected)
    assert learner.restarts == restarts


@pytest.mark.slow
@in_its_loop
async def test_a_process_for_each_step_gives_the_same_bytes(
    learner: PeftLearner, tiny: str, tmp_path: Path
) -> None:
    core = LearnerCore(tiny)
    one = apart = fresh(core, tmp_path)
    other = learner_for(tiny)
    await other.start()
    try:
        for step, process in enumerate((learner, other, learner), start=1):
            # Whatever a process has in memory, the step starts from the parent's files.
            rows = make_rows(8, seed=step)
            request = LearnerStep(
                one,
                folder(tmp_path, f"one{step}"),
                step,
                rows,
                TrainConfig(learning_rate=2e-5, **LENIENT),
            )
            core.step(request, quiet)
            one = request.out
            request = replace(request, parent=apart, out=folder(tmp_path, f"apart{step}"))
            await process.step(request, ignore)
            apart = request.out
            assert contents(one) == contents(apart)
    finally:
        await other.close()


async def test_a_model_that_cannot_be_loaded_stops_the_start(tmp_path: Path) -> None:
    learner = learner_for(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere"):
        await learner.start()
    await learner.close()
