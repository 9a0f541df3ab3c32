"""The memory that `gpu_memory` computes, against the peak of real steps of the learner."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from langchain_art.gpu_memory import LOGIT_BYTES, MemoryNeeds, Shape
from langchain_art_server.algorithms.loss.token_losses import CHUNK_ELEMENTS
from tests.support import forked_start
from tests.support.live_server import REPO
from tests.support.soak import in_soak_alone

#: Measurement over prediction, peak of the process less what it was before the model was loaded.
NEAR = (0.8, 1.25)
#: glibc gives each tensor from 128 KiB on pages of its own, and takes them back at once.
EXACT_HEAP = {"MALLOC_MMAP_THRESHOLD_": "131072"}
RANK = 8


def small(**changes: Any) -> transformers.Qwen3Config:
    """Narrow and deep: much is kept of a token, and it is soon computed."""
    sizes = {
        "vocab_size": 8192,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 14,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    return transformers.Qwen3Config(**sizes | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "dtype", "length", "count", "exact"),
    [
        ({"num_hidden_layers": 8, "hidden_size": 192}, "float32", 512, 2, False),
        in_soak_alone({}, "bfloat16", 512, 2, True),
    ],
)
def test_a_steps_peak_is_predicted(
    changes: dict[str, Any], dtype: str, length: int, count: int, exact: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = small(**changes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    argv = [sys.executable, "-m", "tests.support.measured_step", str(tmp_path), dtype]
    argv += [str(length), str(count)]
    env = os.environ | (EXACT_HEAP if exact else {})  # which is read when a program starts
    run: Any = subprocess.run if exact else forked_start.run
    done = run(argv, capture_output=True, text=True, cwd=REPO, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["alive"] == count * (length - 1) and not found["checkpointed"]
    shape = Shape.of_config(json.loads((tmp_path / "model/config.json").read_text()))
    assert shape.parameters == pytest.approx(found["parameters"], rel=0.01)
    needs, heaped = (MemoryNeeds(shape, dtype, RANK, cpu=cpu) for cpu in (False, True))
    assert needs.token(checkpointed=False) == pytest.approx(found["token"], rel=0.02)
    needed = needs.step(found["alive"], checkpointed=False)
    held = needed if exact else heaped.step(found["alive"], checkpointed=False)
    # What glibc's heap keeps differs from run to run, between nothing more and CPU_HEAP.
    assert NEAR[0] * needed <= found["bytes"] <= NEAR[1] * held


def test_published_configs_give_the_published_sizes() -> None:
    # From the models' cards: 7.61B and 0.49B; 30.5B in all of a mixture of 128 experts.
    qwen = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    qwen |= {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}
    assert Shape.of_config(qwen).parameters == pytest.approx(7.61e9, rel=0.01)
    half = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    half |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
    tied = Shape.of_config(half | {"tie_word_embeddings": True})
    assert tied.parameters == pytest.approx(0.49e9, rel=0.02)
    moe = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    moe |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    moe |= {"vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8}
    mixture = Shape.of_config(moe)
    assert mixture.parameters == pytest.approx(30.5e9, rel=0.02) and mixture.active == 8


def test_the_logits_are_those_of_the_learner() -> None:
    assert LOGIT_BYTES == CHUNK_ELEMENTS * 4 * 3
