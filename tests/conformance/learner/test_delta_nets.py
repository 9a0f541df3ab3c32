"""Gated delta nets over a token forest: as each row alone, the rule written out by token."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from langchain_art_server.algorithms.sequences.prefix_forest import PartCosts
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.models.base_weights import load_causal
from langchain_art_server.backends.models.delta_nets import delta_nets
from langchain_art_server.backends.peft import packer
from langchain_art_server.backends.peft.forest.delta_nets import install
from langchain_art_server.backends.peft.forest.packing import FOREST_ATTENTION, ForestRows
from langchain_art_server.backends.peft.logprob_scoring import CountedTokens, PaddedRows, Scorer
from langchain_art_server.backends.peft.packer import use_forest
from tests.support.learner_cases import SHAPE, VOCAB
from tests.support.soak import in_soak_alone
from tests.support.tiny_models import DELTA_HEADS

DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    **DELTA_HEADS,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
#: All of transformers' with such layers, but for `qwen4_exp`, whose tokens also depend on n-grams.
CONFIGS = {
    "Qwen3NextConfig": {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]},
    "Qwen3_5TextConfig": {},
    "Qwen3_5MoeTextConfig": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "OlmoHybridConfig": {},
    "LaraMiniConfig": {},
}


def scorer(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Scorer:
    config = getattr(transformers, name)(**SHAPE | DELTA | CONFIGS[name])
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return Scorer(load_causal(str(folder), dtype, torch.device("cpu")))


def branching(seed: int, count: int, longest: int) -> list[Row]:
    """Rows that go on from places in others, many from the same, some from their first tokens."""
    rng = random.Random(seed)
    rows: list[list[int]] = []
    for _ in range(count):
        begun = rng.choice(rows) if rows else []
        begun = begun[: rng.choice([0, 1, 2, 3, len(begun) // 2, len(begun) - 1, len(begun)])]
        rows.append(begun + [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))])
    return [
        Row(ids, [0] + [1] * (len(ids) - 1), [0.0] * len(ids), [0.0] * len(ids))
        for ids in rows
        if len(ids) > 1
    ]


def recurrent_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """``S ← S eᵍ + k (β (v - Sᵀk))ᵀ``, ``o = Sᵀq / √D``, with q and k of length 1."""
    times = value.shape[2] // key.shape[2]
    q, k = (x.repeat_interleave(times, 2) for x in (query, key))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = value.new_zeros(len(value), value.shape[2], q.shape[-1], value.shape[-1])
    found: list[Tensor] = []
    for at in range(value.shape[1]):
        state = state * g[:, at].exp()[..., None, None]
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, at])
        write = (value[:, at] - read) * beta[:, at, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, at], write)
        found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, at]) * q.shape[-1] ** -0.5)
    return torch.stack(found, 1), None


# `test_image_positions` has Qwen3.5's; all are compared in float32 by the test below.
@pytest.mark.parametrize("name", ["Qwen3NextConfig", in_soak_alone("OlmoHybridConfig")])
def test_a_forest_is_the_rows_one_by_one(
    name: str, tmp_path: Path, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logprobs, and the gradient by all embeddings, in float64; each token is computed once."""
    one = scorer(name, tmp_path, torch.float64)
    one.base.set_experts_implementation("eager")  # the other one has no float64
    layers = delta_nets(one.base)
    module = vars(sys.modules[type(layers[0]).__module__])
    cases = [(branching(8, 14, 9), (8,)), (branching(102, 4, 90), (100, 10_000))]
    alone: list[tuple[Tensor, Tensor]] = []
    with monkeypatch.context() as patched:
        patched.setitem(module, "torch_chunk_gated_delta_rule", recurrent_rule)
        for rows, _ in cases:
            each: list[tuple[Tensor, Tensor]] = []
            for row in rows:
                counted = CountedTokens.of([row])
                padded = PaddedRows([row], counted, one.base)
                each.append(packer._both_passes(padded, one, counted))
            logprobs, gradients = zip(*each, strict=True)
            alone.append((torch.cat(logprobs), torch.stack(gradients).sum(0)))
    install(layers)
    one.base.set_attn_implementation(FOREST_ATTENTION)
    seen = list[int]()
    one.base.get_input_embeddings().register_forward_hook(
        lambda _module, args, _out: seen.append(args[0].numel())
    )
    for (rows, budgets), (expected, gradient) in zip(cases, alone, strict=True):
        counted = CountedTokens.of(rows)
        shown = [row.token_ids[:-1] for row in rows]
        distinct = {tuple(ids[: at + 1]) for ids in shown for at in range(len(ids))}
        for budget in budgets:
            seen.clear()
            forest = ForestRows(rows, counted, budget, float("inf"), one.base, PartCosts())
            found, of_forest = packer._both_passes(forest, one, counted)
            assert (found - expected).abs().max() < 1e-12
            assert ((of_forest - gradient).norm() / gradient.norm()).item() < 1e-12
            assert sum(seen) == len(distinct) and (len(seen) > 1) == (budget < 10_000)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_server_takes_forests_of_them(name: str, tmp_path: Path) -> None:
    assert use_forest(scorer(name, tmp_path)) is None
