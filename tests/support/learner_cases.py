"""Tiny random models, rows and steps for the learner's tests."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from langchain_art.wire import ClippedRatio, LoraConfig, TrainConfig
from langchain_art_server.algorithms.sequences.token_sets import of_mask, unpack
from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run
from langchain_art_server.backends.base import ChatReply, LearnerStep
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.tiny_models import DELTA_HEADS

torch.set_num_threads(1)

VOCAB = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
#: For models whose heads are as wide as their number says.
PLAIN_HEADS = {name: value for name, value in SHAPE.items() if name != "head_dim"}
CONFIGS = {
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHAPE, sliding_window=8, final_logit_softcapping=3.0, query_pre_attn_scalar=8
    ),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=5),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHAPE,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "granite": lambda: transformers.GraniteConfig(**PLAIN_HEADS, logits_scaling=4.0),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **SHAPE,
        layer_types=["linear_attention", "full_attention"],
        **DELTA_HEADS,
        num_experts=0,
        mlp_only_layers=[0, 1],
    ),
}
LORA = LoraConfig(rank=4, alpha=8.0)
#: Rows of `make_rows` are far off the policy: nothing may be left out for that.
LENIENT: dict[str, Any] = {
    "loss": ClippedRatio(importance_sampling=None),
    "guard": None,
    "max_logprob_gap": None,
    "max_kl": None,
}
FILES = ("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors")


def save_models(folder: Path) -> dict[str, Path]:
    """One tiny random model per architecture, the same every time."""
    for name, config in CONFIGS.items():
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config()).save_pretrained(folder / name)
    return {name: folder / name for name in CONFIGS}


def make_rows(count: int, seed: int = 0, *, temperature: float = 1.0, low: int = 3) -> list[Row]:
    rng = random.Random(seed)
    rows: list[Row] = []
    for _ in range(count):
        length, sign = rng.randrange(low, 24), rng.choice([-1.0, 0.5, 1.0])
        mask = [0] + [int(rng.random() < 0.6) for _ in range(length - 2)] + [1]
        rows.append(
            Row(
                token_ids=[rng.randrange(VOCAB) for _ in range(length)],
                mask=mask,
                logprobs=[-rng.uniform(3.0, 5.0) * m for m in mask],
                advantages=[sign * m for m in mask],
                temperature=temperature,
            )
        )
    return rows


def branching_rows(count: int, seed: int = 0, *, temperature: float = 1.0) -> list[Row]:
    """Rows of several calls, of which many begin as an earlier one does."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for _ in range(count):
        parent = rng.choice(rows).token_ids if rows and rng.random() < 0.8 else []
        ids = parent[: rng.randrange(len(parent) // 2, len(parent))] if parent else []
        ids = ids + [rng.randrange(VOCAB) for _ in range(rng.randrange(3, 12))]
        mask = [0] + [int(rng.random() < 0.6) for _ in range(len(ids) - 2)] + [1]
        calls, call = [], 0
        for trained in mask:
            calls.append(call if trained else -1)
            call += rng.random() < 0.2
        rows.append(
            Row(
                token_ids=ids,
                mask=mask,
                logprobs=[-rng.uniform(3.0, 5.0) * m for m in mask],
                advantages=[rng.choice([-1.0, 0.5, 1.0]) * m for m in mask],
                temperature=temperature,
                calls=calls,
            )
        )
    return rows


def long_runs(scenarios: int, runs: int, own: int, seed: int = 0) -> list[Row]:
    """Runs that share 20 tokens, and six more in their scenario; most of their own are trained."""
    rng, found = random.Random(seed), list[Row]()

    def some(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    shared = some(20)
    for _ in range(scenarios):
        asked = shared + some(6)
        for _ in range(runs):
            length = rng.randint(own // 2, own)
            mask = [0] * len(asked) + [int(at % 10 > 1) for at in range(length)]
            zeros, way = [0.0] * len(mask), rng.choice([-1.0, 1.0])
            found.append(Row(asked + some(length), mask, zeros, [way * m for m in mask]))
    return found


def drawn_from(rng: random.Random, token: int) -> bytes:
    """A set of tokens that a token could be drawn from: it alone, some, most or all."""
    count = rng.choice([1, 3, VOCAB // 2, VOCAB - 1, VOCAB])
    allowed = np.zeros(VOCAB, dtype=bool)
    allowed[[token, *rng.sample(range(VOCAB), count - 1)]] = True
    return of_mask(allowed)


def restricted(rows: list[Row], seed: int = 5) -> list[Row]:
    """The same rows, each trained token drawn from some of all tokens, as under a grammar."""
    rng = random.Random(seed)
    return [
        replace(
            row,
            drawn_from=[
                drawn_from(rng, token) if trained else b""
                for token, trained in zip(row.token_ids, row.mask, strict=True)
            ],
        )
        for row in rows
    ]


def on_policy(core: LearnerCore, adapter: Path | None, rows: list[Row]) -> list[Row]:
    """The same rows, as if the learner itself had sampled them."""
    found = core.logprobs(adapter, rows)
    return [
        replace(row, logprobs=[float(p) * m for p, m in zip(own, row.mask, strict=True)])
        for row, own in zip(rows, found, strict=True)
    ]


def gaps(
    core: LearnerCore, adapter: Path | None, replies: Sequence[ChatReply], temperature: float = 1.0
) -> torch.Tensor:
    """For each token of some replies, how far the learner's logprob is from the sampler's."""
    found: list[float] = []
    for reply in replies:
        (row,) = rows_of_run(
            [
                SampledCall(
                    "c",
                    reply.prompt_token_ids,
                    reply.token_ids,
                    reply.logprobs,
                    temperature,
                    drawn_from=unpack(reply.drawn_from),
                )
            ]
        )
        (own,) = core.logprobs(adapter, [row])
        start = len(reply.prompt_token_ids)
        found += [abs(a - b) for a, b in zip(own[start:], reply.logprobs, strict=True)]
    return torch.tensor(found, dtype=torch.float64)


def jittered(rows: list[Row], spread: float) -> list[Row]:
    """The same rows, as if sampled a little off the policy: some tokens are clipped, some not."""
    rng = random.Random(4)
    return [
        replace(
            row,
            logprobs=[
                (p + rng.gauss(0, spread)) * m for p, m in zip(row.logprobs, row.mask, strict=True)
            ],
        )
        for row in rows
    ]


def quiet(_fraction: float, _message: str) -> None: ...


async def ignore(_fraction: float, _message: str) -> None: ...


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def fresh(core: LearnerCore, where: Path, lora: LoraConfig = LORA) -> Path:
    out = folder(where, f"v0-{len(list(where.iterdir()))}")
    core.init_adapter(out, lora)
    return out


def shake(adapter: Path, scale: float = 0.3) -> Path:
    """Give an adapter a B that is not zero, so that every parameter has a gradient."""
    tensors = load_file(adapter / FILES[1])
    generator = torch.Generator().manual_seed(3)
    for name in sorted(tensors):
        if "lora_B" in name:
            tensors[name] = torch.randn(tensors[name].shape, generator=generator) * scale
    save_file(tensors, adapter / FILES[1], metadata={"format": "pt"})
    return adapter


def take(
    core: LearnerCore, parent: Path, out: Path, rows: list[Row], step: int = 1, **config: Any
) -> dict[str, float]:
    settings = TrainConfig(**({"learning_rate": 1e-2} | LENIENT | config))
    return core.step(LearnerStep(parent, out, step, rows, settings), quiet)


def gradients_of(core: LearnerCore) -> dict[str, torch.Tensor | None]:
    """The gradients of the adapter's parameters, which are taken away."""
    found = {name: parameter.grad for name, parameter in core.parameters.items()}
    for parameter in core.parameters.values():
        parameter.grad = None
    return found


def naive_model(model_path: str, adapter: Path) -> Any:
    """The model with an adapter that learns, in float64, with eager attention."""
    base = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float64, attn_implementation="eager"
    )
    return peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True).double().eval()


def naive_gradients(model: Any) -> dict[str, torch.Tensor]:
    """What `backward` has left in such a model, by the learner's names of the parameters."""
    named = model.named_parameters()
    return {name.replace(".default", ""): p.grad for name, p in named if p.grad is not None}


def contents(adapter: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(adapter.iterdir())}


def worst_error(core: LearnerCore, expected: dict[str, torch.Tensor]) -> float:
    """Relative to the whole tensor's size, of the worst parameter; gradients are taken away."""
    assert set(expected) == set(core.parameters) and len(expected) == 28
    errors: list[float] = []
    for name, gradient in gradients_of(core).items():
        assert gradient is not None
        difference = gradient.double() - expected[name].double()
        errors.append((difference.norm() / expected[name].norm()).item())
    return max(errors)


def naive_divergence(core: LearnerCore, parent: Path, child: Path, rows: list[Row]) -> float:
    """Mean k3 of KL(parent ‖ child) over the trained tokens, in plain Python."""
    found = naive_divergences(core, parent, child, rows)
    return math.fsum(found) / len(found)


def naive_divergences(core: LearnerCore, parent: Path, child: Path, rows: list[Row]) -> list[float]:
    before, after = core.logprobs(parent, rows), core.logprobs(child, rows)
    moves = [
        float(new - old)
        for row, old_T, new_T in zip(rows, before, after, strict=True)
        for trained, old, new in zip(row.mask, old_T, new_T, strict=True)
        if trained
    ]
    return [math.expm1(one) - one for one in moves]
