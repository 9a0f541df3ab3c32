"""vLLM as the sampler on a GPU: ``python -m benchmarks.gpu.sampler [--model NAME] [--small]``.

Random weights of the shape of a real model, sampled by the server's own sampler (vLLM behind its
host process):

- seconds until it answers;
- tokens per second with many calls at once, of the base model and of an adapter on all layers;
- seconds that a new version takes to be loaded and asked, alone and under those calls;
- the distance of its logprobs from the learner's on what it said (mean and worst, in nats);
- seconds to sleep and to wake, and the device memory that its sleep leaves free.

Writes ``out/bench/gpu/sampler-NAME.json``: figures, date, hardware, versions, command.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.gpu.learner import OUT, conditions, keep, settle
from benchmarks.gpu.shapes import SHAPES, random_model
from benchmarks.learning.methods import LORA
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import ChatReply, ChatRequest, Sampling
from langchain_art_server.backends.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.vllm.sampler import VllmSampler
from langchain_art_server.config import Settings
from tests.support.tiny_models import row_of, tokenizer

#: Replies that the learner scores.
SCORED = 32
console = Console()


@dataclass(frozen=True)
class Load:
    """Calls at once, words of each prompt, tokens of each reply, versions that are swapped in."""

    calls: int
    words: int
    tokens: int
    swaps: int = 5


def save(config: PretrainedConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """A model of a shape with random weights, with the tests' small tokenizer.

    Made on the device, which is many times faster; it leaves it.
    """
    random_model(config, dtype, device).save_pretrained(folder)
    settle(device)
    tokenizer().save_pretrained(folder)


def save_random_adapter(name: str, folder: Path, seed: int) -> Path:
    """An adapter on every linear layer, in PEFT's files, made without the model's weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[name]())
    head = model.get_output_embeddings()
    generator, tensors, targets = torch.Generator().manual_seed(seed), {}, set[str]()
    for one, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or layer is head:
            continue
        targets.add(one.rpartition(".")[2])
        sizes = {"A": (LORA.rank, layer.in_features), "B": (layer.out_features, LORA.rank)}
        for side, size in sizes.items():
            key = f"base_model.model.{one}.lora_{side}.weight"
            tensors[key] = 0.02 * torch.randn(size, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": LORA.rank}
    config |= {"lora_alpha": LORA.alpha, "bias": "none", "target_modules": sorted(targets)}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


async def ask(sampler: VllmSampler, load: Load, adapter: str | None, seed: int) -> ChatReply:
    """One reply; every prompt is another, so that none is in the cache."""
    request = ChatRequest(
        id=f"{adapter}-{seed}",
        messages=[{"role": "user", "content": f"{seed} " + "mail " * load.words}],
        adapter=adapter,
        sampling=Sampling(max_tokens=load.tokens, seed=seed),
    )
    async for reply in sampler.chat(request):
        if isinstance(reply, ChatReply):
            return reply
    raise AssertionError("no reply")


async def throughput(
    sampler: VllmSampler, load: Load, adapter: str | None, first: int
) -> tuple[float, list[ChatReply]]:
    """Sampled tokens per second, and the replies."""
    begun = time.perf_counter()
    numbers = range(first, first + load.calls)
    replies = await asyncio.gather(*(ask(sampler, load, adapter, n) for n in numbers))
    seconds = time.perf_counter() - begun
    return sum(len(reply.token_ids) for reply in replies) / seconds, list(replies)


async def swap(sampler: VllmSampler, load: Load, name: str, path: Path) -> float:
    """Seconds from a directory to the first token of its adapter."""
    begun = time.perf_counter()
    await sampler.load_adapter(name, path)
    await ask(sampler, Load(1, load.words, 1), name, 0)
    return time.perf_counter() - begun


def free_bytes(device: torch.device) -> int:
    """Of the device's memory; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def drawn(rows: list[Row], columns: list[Any]) -> np.ndarray:
    """The values at the tokens that the sampler drew."""
    pairs = zip(rows, columns, strict=True)
    return np.concatenate([np.asarray(c)[np.asarray(r.mask) == 1] for r, c in pairs])


def gap(core: LearnerCore, adapter: Path | None, replies: list[ChatReply]) -> dict[str, float]:
    """How far the learner's logprobs are from those that the sampler recorded, in nats."""
    rows = [row_of(reply, 0.0) for reply in replies]
    said = drawn(rows, [row.logprobs for row in rows])
    apart = abs(said - drawn(rows, core.logprobs(adapter, rows)))
    return {"mean": float(apart.mean()), "max": float(apart.max()), "tokens": float(len(apart))}


async def measure(
    settings: Settings,
    name: str,
    folder: Path,
    load: Load,
    device: torch.device,
    note: Callable[[Mapping[str, Any]], None],
) -> None:
    """All figures of one shape, noted as they come. `folder` holds the model, gets adapters."""
    sampler = VllmSampler(settings)
    numbers = range(1, load.swaps + 2)
    paths = [save_random_adapter(name, folder / f"v{n}", n) for n in numbers]
    begun = time.perf_counter()
    await sampler.start()
    found: dict[str, Any] = {"start_seconds": time.perf_counter() - begun}
    note(found)
    try:
        await sampler.load_adapter("v@1", paths[0])
        await throughput(sampler, load, "v@1", 0)  # kernels are compiled, graphs captured
        base, plain = await throughput(sampler, load, None, 1000)
        tuned, adapted = await throughput(sampler, load, "v@1", 2000)
        found |= {"base_tokens_per_second": base, "adapter_tokens_per_second": tuned}
        found["adapter_over_base"] = tuned / base
        note(found)
        alone = [await swap(sampler, load, f"a@{n}", path) for n, path in enumerate(paths[1:], 2)]
        busy = asyncio.create_task(throughput(sampler, load, "v@1", 3000))
        under = [await swap(sampler, load, f"b@{n}", path) for n, path in enumerate(paths[1:], 2)]
        await busy
        found["swap_seconds"] = statistics.median(alone)
        found["swap_seconds_under_load"] = statistics.median(under)
        note(found)
        awake, begun = free_bytes(device), time.perf_counter()
        await sampler.sleep()
        found["sleep_seconds"] = time.perf_counter() - begun
        found["sleep_frees_bytes"] = free_bytes(device) - awake
        begun = time.perf_counter()
        await sampler.wake()
        found["wake_seconds"] = time.perf_counter() - begun
        _, woken = await throughput(sampler, load, "v@1", 2000)
        found["same_after_sleep"] = sum(
            list(a.token_ids) == list(b.token_ids) for a, b in zip(adapted, woken, strict=True)
        ) / len(adapted)
    finally:
        await sampler.close()
    note(found)
    core = LearnerCore(settings.model, str(device), settings.dtype)
    found["gap_base"] = gap(core, None, plain[:SCORED])
    found["gap_adapter"] = gap(core, paths[0], adapted[:SCORED])
    note(found)


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    asked.add_argument("--model", choices=[n for n in SHAPES if n != "small"], default="qwen2.5-7b")
    asked.add_argument("--small", action="store_true", help="a model for a CPU, few calls")
    asked.add_argument("--python", type=Path, default=Path(sys.executable), help="that has vLLM")
    asked.add_argument("--calls", type=int, default=256, help="at once")
    asked.add_argument("--words", type=int, default=1024, help="of each prompt")
    asked.add_argument("--tokens", type=int, default=512, help="of each reply")
    asked.add_argument("--gpu-memory", type=float, default=0.85, help="vLLM's share")
    asked.add_argument("--out", type=Path, default=OUT)
    given = asked.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = "small" if given.small else given.model
    if device.type == "cpu" and not given.small:
        asked.error(f"{name} needs a GPU; --small proves the script on a CPU")
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    load = Load(8, 16, 32, 2) if given.small else Load(given.calls, given.words, given.tokens)
    vllm: dict[str, Any] = {"kind": "vllm", "python": str(given.python)}
    vllm |= {"gpu_memory": given.gpu_memory}
    vllm |= {"max_rank": LORA.rank, "max_batch": load.calls + 1}
    if device.type == "cpu":
        vllm |= {"threads": 1, "kv_cache_bytes": 256 << 20}
    with tempfile.TemporaryDirectory(prefix="art-bench-") as temporary:
        folder = Path(temporary)
        save(SHAPES[name](), folder / "model", device, getattr(torch, dtype))
        told = {"model": str(folder / "model"), "data_dir": folder, "dtype": dtype}
        told |= {"sampler": vllm, "take_turns": True, "max_model_len": 8192}
        settings = Settings.model_validate(told)
        path = given.out / f"sampler-{name}.json"
        about = conditions("sampler", name, device) | {"load": vars(load)}

        def note(figures: Mapping[str, Any]) -> None:
            keep(path, about | {"figures": figures})

        asyncio.run(measure(settings, name, folder, load, device, note))
    console.print(path.read_text(), path, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
