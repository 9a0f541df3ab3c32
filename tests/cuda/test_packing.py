"""How the learner packs rows on a GPU, whose memory is given here; nothing runs on one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from langchain_art.errors import ArtError
from langchain_art.wire import TrainConfig
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft import packer
from langchain_art_server.backends.peft.forest.packing import ForestRows
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.micro_batches import CountedTokens
from tests.support.learner_cases import (
    LENIENT,
    SHAPE,
    contents,
    folder,
    fresh,
    make_rows,
    quiet,
    shake,
    take,
)

LAYERS = 12


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearnerCore:
    """A learner of twelve layers, whose packer takes its device for a GPU."""
    torch.manual_seed(3)
    shape = SHAPE | {"num_hidden_layers": LAYERS, "max_position_embeddings": 1024}
    config = transformers.Qwen3Config(**shape, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    core = LearnerCore(str(tmp_path / "model"))
    core._hold(fresh(core, tmp_path))
    monkeypatch.setattr(packer.Packer, "_device", torch.device("cuda"))
    return core


def agent_rows(groups: int = 4, runs: int = 8) -> list[Row]:
    """Runs that share 650 tokens in their group and end in up to 150 of their own."""
    rng = random.Random(0)
    found: list[Row] = []
    for _ in range(groups):
        start = [rng.randrange(64) for _ in range(650)]
        for _ in range(runs):
            ids = start + [rng.randrange(64) for _ in range(rng.randint(5, 150))]
            mask = [0] * 650 + [1] * (len(ids) - 650)
            found.append(Row(ids, mask, [0.0] * len(ids), [1.0] * len(ids)))
    return found


def parts(packing: object) -> int:
    assert isinstance(packing, ForestRows)
    return len(packing._batches)


def test_rows_that_need_checkpointing_are_packed_by_its_cost(
    core: LearnerCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the cost of activations that are never kept, which made parts of them."""
    rows = agent_rows()
    plain = core.packer._measured()
    free = 120 * plain / packer.MEMORY_SHARE  # not one of the rows fits as it is
    monkeypatch.setattr(packer, "free_bytes", lambda _device: free)
    # Kept with checkpointing: one layer as it is, and of each layer its input, keys and values.
    shape = SHAPE["hidden_size"] + 2 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    each = plain / LAYERS + LAYERS * shape * 4
    fits = int(packer.MEMORY_SHARE * free / each)
    assert fits > 3 * 120
    best = core.packer.pack(rows, CountedTokens.of(rows), fits)
    got = core.batch(rows, TrainConfig()).packing
    assert core.packer.checkpoints
    assert parts(got) <= parts(best) + 1


def test_short_rows_are_made_into_small_parts_and_computed_once(
    core: LearnerCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = core.packer._measured()
    monkeypatch.setattr(packer, "free_bytes", lambda _device: 120 * plain / packer.MEMORY_SHARE)
    packing = core.batch(make_rows(40), TrainConfig()).packing
    assert packing.alive <= 120 < packing.tokens
    assert not core.packer.checkpoints


class ShortOfMemory:
    """Sweeps with gradients of more than `most` tokens at once run out of memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int, *, after: int = 0) -> None:
        self.tried: list[int] = []
        sweep = ForestRows.sweep

        def limited(packing: ForestRows, scorer: Any, visit: Any, progress: Any = None) -> None:
            if progress is not None:
                self.tried.append(packing.alive)
                if packing.alive > most and len(self.tried) > after:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            sweep(packing, scorer, visit, progress)

        monkeypatch.setattr(ForestRows, "sweep", limited)


def test_a_step_that_runs_out_of_memory_is_made_again_with_smaller_parts(
    core: LearnerCore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows, start = make_rows(60), shake(fresh(core, tmp_path))
    plain, said = core.packer._measured(), list[str]()
    monkeypatch.setattr(packer, "free_bytes", lambda _device: 400 * plain / packer.MEMORY_SHARE)
    short = ShortOfMemory(monkeypatch, 150, after=1)  # the first update of two passes
    config = TrainConfig(learning_rate=1e-2, optimizer_steps=2, **LENIENT)
    request = LearnerStep(start, folder(tmp_path, "out"), 1, rows, config)
    core.step(request, lambda _fraction, message: said.append(message))
    assert [alive <= 150 for alive in short.tried] == [False, False, False, True, True]
    assert any("out of memory" in one for one in said), said
    assert "out of memory" in caplog.text
    # Both updates were made from the parent, once: as by a learner that began with those parts.
    again = ShortOfMemory(monkeypatch, 150)
    core._held = None
    core.step(replace(request, out=folder(tmp_path, "again")), quiet)
    assert len(again.tried) == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_a_row_too_long_for_the_memory_is_an_error_after_few_tries(
    core: LearnerCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, out = shake(fresh(core, tmp_path)), folder(tmp_path, "out")
    monkeypatch.setattr(packer, "free_bytes", lambda _device: 1e9)
    short = ShortOfMemory(monkeypatch, 500)
    with pytest.raises(ArtError, match=r"out of device memory .*rows of at most 7\d\d tokens"):
        take(core, start, out, agent_rows(1, 2))
    assert 1 < len(short.tried) < 8 and not list(out.iterdir())
    monkeypatch.undo()
    take(core, start, out, make_rows(4))  # the learner goes on
