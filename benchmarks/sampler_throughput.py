"""Generated tokens per CPU-second on SmolLM2-135M: the embedded sampler against `model.generate`.

Prompts of 51 tokens share their first 41 (a system prompt), or nothing; temperature 1, float32, one
thread. Both have the same new adapter beside the base: the sampler as one of its adapters,
`generate` by PEFT, which gets each batch whole. The two take turns, with prompts that neither has
seen, and a ratio is the median of its turns.

Beside that, on a small random model of Qwen3.5's architecture: rows one at a time over all at once.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.learning.methods import hybrid_model
from benchmarks.learning.workloads import VOCAB as SMALL_VOCAB
from langchain_art.wire import LoraConfig
from langchain_art_server.backends.base import Sampling
from langchain_art_server.backends.embedded.model_runner import make_runner
from langchain_art_server.backends.embedded.multi_lora import AdapterBank
from langchain_art_server.backends.embedded.prefix_cache import PrefixCache
from langchain_art_server.backends.embedded.scheduler import Scheduler
from langchain_art_server.backends.embedded.token_sampler import SamplingState, SequenceState
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.gguf_base import unpacked

MODEL, VOCAB, PROMPT = "smollm2-135m", 49152, 51
#: Tokens that a batch's prompts begin with in common.
SHARED = {"shared": 41, "apart": 0}
ROWS, DRAWN = (1, 8, 32), (8, 32, 128)
TURNS = 3

Run = Callable[[list[list[int]], int], None]


def prompts(rows: int, shared: int, seed: int, vocab: int = VOCAB) -> list[list[int]]:
    rng = random.Random(seed)
    opening = [rng.randrange(3, vocab) for _ in range(shared)]
    return [
        opening + [rng.randrange(3, vocab) for _ in range(PROMPT - shared)] for _ in range(rows)
    ]


def loaded(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def sampler(base: Path, path: Path) -> Run:
    model, budget = loaded(base), 1 << 30
    with torch.inference_mode():
        runner = make_runner(model, max_slots=64, max_len=2048, exact=True, budget=budget)
    cache = runner.cache
    assert cache is not None
    prefixes = PrefixCache(cache.layout, budget=budget, device=cache.device, dtype=cache.dtype)
    bank = AdapterBank(model, cache.device)
    adapter = bank.load("policy@0", path, prefixes.new_root())
    scheduler = Scheduler(runner, bank, prefixes, set(), 64)

    def run(batch: list[list[int]], drawn: int) -> None:
        for seed, prompt in enumerate(batch):
            state = SamplingState(Sampling(), random.Random(seed))
            scheduler.add(SequenceState(prompt, drawn, state, adapter=adapter))
        while scheduler.busy:
            scheduler.step()

    return run


def hf_generate(base: Path, path: Path) -> Run:
    model: Any = PeftModel.from_pretrained(loaded(base), str(path)).eval()

    @torch.inference_mode()
    def run(batch: list[list[int]], drawn: int) -> None:
        ids = torch.tensor(batch)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=drawn,
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )

    return run


def cpu_seconds(run: Run, batch: list[list[int]], drawn: int) -> float:
    start = time.process_time()
    run(batch, drawn)
    return time.process_time() - start


def hybrid() -> float:
    """CPU of 32 calls on gated delta nets one at a time, over that of all at once."""
    with tempfile.TemporaryDirectory() as folder:
        base = hybrid_model(Path(folder) / "base")
        LearnerCore(str(base), "cpu", "float32").init_adapter(Path(folder), LoraConfig())
        ours = sampler(base, Path(folder))
    rows, drawn = max(ROWS), 32
    ours(prompts(2, 0, 0, SMALL_VOCAB), 2)
    ratios: list[float] = []
    for turn in range(TURNS):
        alone, together = (prompts(rows, 0, 2 * turn + n, SMALL_VOCAB) for n in (1, 2))
        one_by_one = sum(cpu_seconds(ours, [one], drawn) for one in alone)
        ratios.append(one_by_one / cpu_seconds(ours, together, drawn))
    return statistics.median(ratios)


def run() -> tuple[dict[str, float], dict[str, object]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    base = unpacked(MODEL, Path(), "cpu")
    figures: dict[str, float] = {}
    worst: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        LearnerCore(str(base), "cpu", "float32").init_adapter(Path(folder), LoraConfig())
        ours, theirs = sampler(base, Path(folder)), hf_generate(base, Path(folder))
    for one in (ours, theirs):
        one(prompts(2, 0, 0), 2)
    seeds = itertools.count(1)
    for kind, rows, drawn in itertools.product(SHARED, ROWS, DRAWN):
        turns: list[tuple[float, float]] = []
        for _ in range(TURNS):
            batch = prompts(rows, SHARED[kind], next(seeds))
            turns.append((cpu_seconds(ours, batch, drawn), cpu_seconds(theirs, batch, drawn)))
        cell = f"{kind}_{rows}x{drawn}"
        mine, other = (
            rows * drawn / statistics.median(column) for column in zip(*turns, strict=True)
        )
        ratio = statistics.median(b / a for a, b in turns)
        figures |= {f"sampled_{cell}": mine, f"generate_{cell}": other, f"over_{cell}": ratio}
        if rows == max(ROWS):
            worst[kind] = min(worst.get(kind, ratio), ratio)
    one_by_one = hybrid()
    torch.set_num_threads(threads)
    figures |= {f"{kind}_over_generate": ratio for kind, ratio in worst.items()}
    figures["real_over_generate"] = min(worst.values())
    figures["hybrid_over_one"] = one_by_one
    about = {"model": MODEL, "prompt": PROMPT, "shared": SHARED["shared"], "turns": TURNS}
    return figures, {**about, "adapter": "rank 16, all linear layers"}
