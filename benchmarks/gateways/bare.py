"""The embedded engine driven without a gateway, and the model that it samples from."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from langchain_art_server.backends.base import ChatReply, ChatRequest, Sampling
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from tests.support.live_server import BASE_MODEL


def make_model(folder: Path) -> Path:
    """A random model of 9 million parameters, with the e-mail example's tokenizer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(BASE_MODEL)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def drive(sampler: TransformersSampler, callers: list[list[Any]]) -> dict[str, float]:
    """The calls of `client.load`, asked of the sampler itself; the same figures."""

    async def call(body: dict[str, Any]) -> int:
        sampling = Sampling(max_tokens=body["max_tokens"], seed=body["seed"])
        request = ChatRequest("bare", body["messages"], sampling=sampling)
        said = [len(p.token_ids) async for p in sampler.chat(request) if isinstance(p, ChatReply)]
        return sum(said)

    async def caller(mine: list[Any]) -> int:
        return sum([await call(body) for _, body in mine])

    begun = time.monotonic()
    tokens = sum(await asyncio.gather(*map(caller, callers)))
    calls = sum(map(len, callers))
    return {"calls": calls, "seconds": time.monotonic() - begun, "tokens": tokens}
