"""Ways to get the gradient of one step, all in this process, on our model and our loss."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from benchmarks.learning.workloads import VOCAB, Workload
from langchain_art import ClippedRatio, LoraConfig, TrainConfig
from langchain_art_server.algorithms.sequences.prefix_forest import (
    Forest,
    Part,
    PartCosts,
    Segment,
    split,
)
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft import adapter_io
from langchain_art_server.backends.peft.forest import packing
from langchain_art_server.backends.peft.forest.packing import FOREST_ATTENTION
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.gguf_base import unpacked

#: The policy gradient and nothing else, so that every method can be told to compute it.
CONFIG = TrainConfig(
    learning_rate=2e-5,
    loss=ClippedRatio(importance_sampling=None, dual_clip=None),
    guard=None,
    max_logprob_gap=None,
)
LORA = LoraConfig(rank=16, alpha=32.0)
Gradient = dict[str, torch.Tensor]


#: Of the random models.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}


def save_model(folder: Path) -> Path:
    """A random model of 1.3 million parameters."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)
    return folder


def hybrid_model(folder: Path) -> Path:
    """A random model of Qwen3.5's architecture: three of four layers are gated delta nets."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        **SHAPE,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        eos_token_id=2,
    )
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


def real_model(folder: Path) -> Path:
    """SmolLM2-135M-Instruct."""
    base = unpacked("smollm2-135m", Path(), "cpu")
    return shutil.copytree(base, folder, dirs_exist_ok=True)


def make_core(save: Callable[[Path], Path] = save_model) -> LearnerCore:
    """Our learner, with an adapter that already does something; both lie in its model's folder."""
    transformers.utils.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="art-bench-"))
    core = LearnerCore(str(save(folder)))
    core.init_adapter(folder, LORA)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in sorted(core.parameters):
            if "lora_B" in name:
                core.parameters[name].normal_(std=0.02, generator=generator)
    adapter_io.write_adapter(folder, core._config, core.parameters)
    return core


@dataclass
class Method:
    """One way: what it is given, and how many tokens it put through the model."""

    name: str
    rows: Callable[[Workload], list[Row]]
    around: Callable[[LearnerCore], object]
    tokens: int = 0

    def gradient(self, core: LearnerCore, rows: Sequence[Row]) -> Gradient:
        """From rows to the gradients of all parameters of the adapter."""
        batch = core.batch(rows, CONFIG)
        core.accumulate(batch, lambda _fraction, _message: None)
        self.tokens = batch.packing.tokens
        found: Gradient = {}
        for name, parameter in core.parameters.items():
            assert parameter.grad is not None
            found[name], parameter.grad = parameter.grad, None
        return found


@contextmanager
def as_it_is(_engine: LearnerCore) -> Iterator[None]:
    """Our learner."""
    yield


@contextmanager
def padded(core: LearnerCore) -> Iterator[None]:
    """Rows sorted by length, padded on the right, through transformers' own SDPA attention."""
    core.packer.padded_because = "benchmark"
    core.base.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        core.packer.padded_because = None
        core.base.set_attn_implementation(FOREST_ATTENTION)


@contextmanager
def packed(_engine: LearnerCore) -> Iterator[None]:
    """Rows end to end without padding; each attends to itself alone, by the fused causal kernel."""
    with mock.patch.object(packing, "lay_out", apart):
        yield


def apart(
    sequences: Sequence[Sequence[int]], _token_cost: float, budget: int, _costs: PartCosts
) -> tuple[Forest, list[Part]]:
    """Rows as a forest in which nothing is shared."""
    lengths = [len(sequence) for sequence in sequences]
    ends = np.cumsum(lengths)
    bounds = [(int(end) - length, int(end)) for end, length in zip(ends, lengths, strict=True)]
    forest = Forest(
        token_ids_N=np.concatenate([np.asarray(sequence) for sequence in sequences]),
        depth_N=np.concatenate([np.arange(length) for length in lengths]),
        exit_N=np.repeat(ends, lengths),
        rows=[np.arange(start, end) for start, end in bounds],
        segments=[Segment(start, end, end, 0, -1) for start, end in bounds],
    )
    return forest, split(forest, budget)


def methods() -> list[Method]:
    """Ours first."""
    return [
        Method("forest", Workload.rows, as_it_is),
        Method("padded rows", Workload.rows, padded),
        Method("packed rows", Workload.rows, packed),
        Method("a row per call", Workload.call_rows, packed),
    ]


def distance(one: Gradient, other: Gradient) -> float:
    """Of two gradients, relative to the first one's length."""
    squares = sum((one[name] - other[name]).double().square().sum().item() for name in one)
    return (squares / sum(g.double().square().sum().item() for g in one.values())) ** 0.5
