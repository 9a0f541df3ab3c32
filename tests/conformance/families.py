"""A small random model of each family, through everything that a policy goes through.

What a family is here is its architecture. Weights, tokenizer and chat template are the tests' own,
since nothing is downloaded: templates and tool formats have tests of their own (`test_tool_calls`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from langchain_art.wire import LoraConfig, TrainConfig
from langchain_art_server.algorithms.samples import Row
from langchain_art_server.backends.base import ChatReply, LearnerStep
from langchain_art_server.backends.peft_engine import PeftEngine
from tests.conformance.tiny_models import CLOCK, SMALL, WEATHER, LocalSampler, ask, tokenizer

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
#: Name -> configuration class, and what it has beside `SMALL`.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {}),
    "Qwen3 MoE": (
        "Qwen3MoeConfig",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "Llama 3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "Mistral": ("MistralConfig", {"sliding_window": None}),
    "Mistral, sliding window": ("MistralConfig", {"sliding_window": 24}),
    "Gemma 3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "DeepSeek V3, Kimi K2": ("DeepseekV3Config", MLA),
}
LORA = LoraConfig(rank=4, alpha=8.0)
STEPS = 3
HEAD = f"""\
# Model families

Written by `tests/conformance/test_families.py` with `UPDATE_DOCS=1`; edit that. A small random
model of each family (3 layers, hidden size 32, float32, CPU) is sampled from, made to call tools,
trained for {STEPS} steps and swapped after each, with the embedded sampler and the PEFT learner.

The architecture is the family's; weights, tokenizer and chat template are the tests' own, so this
says nothing of a template or a tool format: `tests/unit_tests/test_tool_calls.py` does. *Gap* is
the mean distance of sampler and learner per token, the worst of all steps, after each swap too.
*Common beginnings* of runs are computed once where the architecture's attention is plain causal
attention; elsewhere rows are padded. In a mixture, LoRA goes on the attention alone: the experts
are one stacked tensor each, which no sampler here can adapt.

| family | architecture | tool calls | LoRA on | common beginnings | gap below | swapped |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Outcome:
    """What was seen of a family.

    Attributes:
        architecture: of transformers.
        targets: linear layers that LoRA was put on.
        tool_calls: forced calls that were parsed, of two.
        forest: why rows did not go as a forest; None if they did.
        gaps: mean distance of the sampler's and the learner's logprobs before each step, in nats:
            version 0, and then each version that the sampler had loaded meanwhile.
        moved: how far the last version's logprobs are from the base's on the same tokens.
        base_stayed: the base said the same, token for token, before and after.
    """

    architecture: str
    targets: list[str]
    tool_calls: int
    forest: str | None
    gaps: list[float]
    moved: float
    base_stayed: bool


def save_family(family: str, folder: Path) -> Path:
    """Write a random model of a family, the same every time."""
    name, special = FAMILIES[family]
    config = getattr(transformers, name)(**SMALL | special)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def go_through(family: str, folder: Path) -> Outcome:
    """Sample, call a tool, train, swap, again and again."""
    model = save_family(family, folder / "model")
    sampler, engine = LocalSampler(model), PeftEngine(str(model), "cpu")
    (before,) = sampler.chat(ask(seed=1, max_tokens=12))
    tool_calls = _call_tools(sampler)
    adapter = folder / "v0"
    adapter.mkdir()
    engine.init_adapter(adapter, LORA)
    sampler.load("p@0", adapter)
    gaps: list[float] = []
    config = TrainConfig(learning_rate=2e-2)
    rows: list[Row] = []
    for step in range(1, STEPS + 1):
        name = f"p@{step - 1}"
        asked = [ask(seed=8 * step + k, adapter=name, max_tokens=16) for k in range(8)]
        rows = [_row(reply, index) for index, reply in enumerate(sampler.chat(*asked))]
        out = folder / f"v{step}"
        out.mkdir()
        request = LearnerStep(adapter, out, step, rows, config)
        gaps.append(engine.step(request, lambda _f, _m: None)["logprob_gap_mean"])
        adapter = out
        sampler.load(f"p@{step}", adapter)
    old, new = engine.logprobs(None, rows), engine.logprobs(adapter, rows)
    moved = [abs(a - b) for x, y in zip(old, new, strict=True) for a, b in zip(x, y, strict=True)]
    (after,) = sampler.chat(ask(seed=1, max_tokens=12))
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    return Outcome(
        architecture=type(engine.base).__name__,
        targets=targets,
        tool_calls=tool_calls,
        forest=engine.packer.padded_because,
        gaps=gaps,
        moved=sum(moved) / len(moved),
        base_stayed=before.token_ids == after.token_ids,
    )


def _call_tools(sampler: LocalSampler) -> int:
    named = {"type": "function", "function": {"name": "clock"}}
    replies = sampler.chat(
        ask(seed=2, tools=[WEATHER, CLOCK], tool_choice="required", max_tokens=300),
        ask(seed=3, tools=[WEATHER, CLOCK], tool_choice=named, max_tokens=200),
    )
    return sum(bool(reply.tool_calls) for reply in replies)


def _row(reply: ChatReply, index: int) -> Row:
    prompt, said = list(reply.prompt_token_ids), list(reply.token_ids)
    zeros = [0.0] * len(prompt)
    advantage = 1.0 if index % 2 else -1.0
    return Row(
        prompt + said,
        [0] * len(prompt) + [1] * len(said),
        zeros + [min(0.0, value) for value in reply.logprobs],
        zeros + [advantage] * len(said),
    )


def page(outcomes: dict[str, Outcome]) -> str:
    """``docs/models.md``. Numbers are rounded up, so that it does not change from run to run."""
    lines = [HEAD]
    for family, one in outcomes.items():
        once = "computed once" if one.forest is None else f"again in each row: {one.forest}"
        swapped = "yes" if one.base_stayed and one.moved > 0.01 else "**no**"
        targets = ", ".join(sorted(one.targets))
        lines.append(
            f"| {family} | `{one.architecture}` | {one.tool_calls} of 2 | {targets} | {once} | "
            f"{_above(max(one.gaps))} nats | {swapped} |"
        )
    return "\n".join(lines) + "\n"


def _above(gap: float) -> str:
    return next(bar for bar in ("1e-6", "1e-5", "1e-4", "1e-3", "1") if gap <= float(bar))
