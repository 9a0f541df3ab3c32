"""Generated tokens per CPU-second: the embedded sampler against `model.generate`, side by side.

Each row of a batch has a prompt of 300 tokens, of which the rows share the first 280, and draws 20
tokens at temperature 1, on one thread. `generate` gets the same prompts as one batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from langchain_art_server.backends.base import Sampling
from langchain_art_server.backends.embedded.model_runner import make_runner
from langchain_art_server.backends.embedded.multi_lora import AdapterBank
from langchain_art_server.backends.embedded.prefix_cache import PrefixCache
from langchain_art_server.backends.embedded.scheduler import Scheduler
from langchain_art_server.backends.embedded.sequence import SequenceState
from langchain_art_server.backends.embedded.token_sampler import SamplingState

PROMPT, SHARED, DRAWN, VOCAB = 300, 280, 20, 512
ROWS = (1, 8, 32, 64, 128)
SECONDS = 3.0


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    return Qwen3ForCausalLM(config).eval()


def prompts(rows: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(SHARED)]
    return [shared + [rng.randrange(VOCAB) for _ in range(PROMPT - SHARED)] for _ in range(rows)]


def sampler(model: Qwen3ForCausalLM) -> Callable[[list[list[int]]], None]:
    budget = 1 << 30
    with torch.inference_mode():
        runner = make_runner(model, max_slots=128, max_len=2048, exact=True, budget=budget)
    cache = runner.cache
    assert cache is not None
    prefixes = PrefixCache(cache.layout, budget=budget, device=cache.device, dtype=cache.dtype)
    scheduler = Scheduler(runner, AdapterBank(model, cache.device), prefixes, set(), 128)

    def run(batch: list[list[int]]) -> None:
        for prompt in batch:
            state = SamplingState(Sampling(), random.Random(0))
            scheduler.add(SequenceState(prompt, DRAWN, state))
        while scheduler.busy:
            scheduler.step()

    return run


def hf_generate(model: Qwen3ForCausalLM) -> Callable[[list[list[int]]], None]:
    @torch.inference_mode()
    def run(batch: list[list[int]]) -> None:
        ids = torch.tensor(batch)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=DRAWN,
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )

    return run


def rate(run: Callable[[list[list[int]]], None], rows: int) -> float:
    run(prompts(rows, 0))
    spent, drawn, seed = 0.0, 0, 1
    while spent < SECONDS:
        batch = prompts(rows, seed)  # a new shared prefix each time: no cache helps
        start = time.process_time()
        run(batch)
        spent += time.process_time() - start
        drawn += rows * DRAWN
        seed += 1
    return drawn / spent


def run() -> tuple[dict[str, float], dict[str, object]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = tiny_model()
    ours, theirs = sampler(model), hf_generate(model)
    figures: dict[str, float] = {}
    for rows in ROWS:
        mine, other = rate(ours, rows), rate(theirs, rows)
        figures[f"sampled_per_cpu_second_{rows}"] = mine
        figures[f"generate_per_cpu_second_{rows}"] = other
        figures[f"sampled_over_generate_{rows}"] = mine / other
    torch.set_num_threads(threads)
    return figures, {"prompt": PROMPT, "shared": SHARED, "drawn": DRAWN, "model": "Qwen3 h64 l3"}
