"""The memory that `gpu_memory` computes, against the peak of real steps of the learner."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers

from langchain_art.gpu_memory import LOGIT_BYTES, MemoryNeeds, Shape
from langchain_art_server.algorithms.loss.token_losses import CHUNK_ELEMENTS
from tests.support import forked_start
from tests.support.live_server import REPO

#: Measurement over prediction, peak of the process less what it was before the model was loaded.
NEAR = (0.8, 1.25)
RANK = 8


@pytest.mark.slow
def test_a_steps_peak_is_predicted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=8192,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=8,  # narrow and deep: much is kept of a token, and it is soon computed
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    argv = [sys.executable, "-m", "tests.support.measured_step", str(tmp_path), "float32"]
    argv += ["512", "2"]
    done = forked_start.run(argv, capture_output=True, text=True, cwd=REPO, env={**os.environ})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["alive"] == 2 * 511 and not found["checkpointed"]
    shape = Shape.of_config(json.loads((tmp_path / "model/config.json").read_text()))
    assert shape.parameters == pytest.approx(found["parameters"], rel=0.01)
    needs, heaped = (MemoryNeeds(shape, "float32", RANK, cpu=cpu) for cpu in (False, True))
    assert needs.token(checkpointed=False) == pytest.approx(found["token"], rel=0.02)
    needed = needs.step(found["alive"], checkpointed=False)
    held = heaped.step(found["alive"], checkpointed=False)
    # What glibc's heap keeps differs from run to run, between nothing more and CPU_HEAP.
    assert NEAR[0] * needed <= found["bytes"] <= NEAR[1] * held


def test_a_mixture_of_experts_has_its_published_size() -> None:
    # 30.5B in all of 128 experts; `test_server_settings` has those of dense models.
    moe = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    moe |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    moe |= {"vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8}
    mixture = Shape.of_config(moe)
    assert mixture.parameters == pytest.approx(30.5e9, rel=0.02) and mixture.active == 8


def test_the_logits_are_those_of_the_learner() -> None:
    assert LOGIT_BYTES == CHUNK_ELEMENTS * 4 * 3
