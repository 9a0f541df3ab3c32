"""How far vLLM's logprobs are from the learner's on the tokens that vLLM drew, per token in nats.

The e-mail example's model with heads of 32 dimensions and an adapter that two steps have made; the
first question of each run, asked at temperature 1. vLLM runs in float32 and in bfloat16; in
bfloat16 it is compared with a learner in bfloat16, as on a GPU, and with one in float32, which
shows vLLM's own part of the distance. `rounding` is that of the two learners from each other on the
same tokens: what bfloat16 costs where there is no second engine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.utils.function_calling import convert_to_openai_tool

from examples.email_search.agent import SYSTEM_PROMPT, TOOLS
from examples.email_search.inbox import generate
from examples.email_search.train import MAX_TOKENS
from langchain_art import LoraConfig, TrainConfig
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import ChatRequest, LearnerStep, Sampling
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.families import VllmSamples, on_vllm, row_of
from tests.support.vllm_engine import wide_model

QUESTIONS, STEPS, POLICY = 256, 2, "policy@1"


def requests(count: int, adapter: str) -> list[ChatRequest]:
    """First calls of the e-mail agent."""
    tools = [convert_to_openai_tool(tool) for tool in TOOLS]
    return [
        ChatRequest(
            id=f"{adapter}-{number}",
            messages=[
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": scenario.question},
            ],
            tools=tools,
            adapter=adapter,
            sampling=Sampling(max_tokens=MAX_TOKENS, seed=number),
        )
        for number, (scenario, _) in enumerate(generate(count, 0, seed=7))
    ]


def made_adapter(sampler: VllmSamples, learner: LearnerCore, folder: Path) -> Path:
    """A policy after some steps that reward every second run."""
    adapter = folder / "0"
    adapter.mkdir()
    learner.init_adapter(adapter, LoraConfig())
    for step in range(1, STEPS + 1):
        name, out = f"made@{step}", folder / str(step)
        sampler.load(name, adapter)
        rows = rows_of(sampler, requests(32, name))
        out.mkdir()
        config = TrainConfig(learning_rate=1e-3)
        learner.step(LearnerStep(adapter, out, step, rows, config), lambda _f, _m: None)
        sampler.unload(name)
        adapter = out
    return adapter


def rows_of(sampler: VllmSamples, asked: list[ChatRequest]) -> list[Row]:
    """What the sampler says, every second reply rewarded."""
    replies = sampler.chat(*asked)
    assert not any(reply.excluded_because for reply in replies)
    return [row_of(reply, 2.0 * (i % 2) - 1.0) for i, reply in enumerate(replies)]


def drawn(rows: list[Row], columns: list[Any]) -> np.ndarray:
    """The values at the tokens that the sampler drew."""
    pairs = zip(rows, columns, strict=True)
    return np.concatenate([np.asarray(c)[np.asarray(r.mask) == 1] for r, c in pairs])


def run() -> tuple[dict[str, float], dict[str, Any]]:
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = wide_model(folder / "model")
        float32, bfloat16 = (LearnerCore(str(model), "cpu", d) for d in ("float32", "bfloat16"))
        rows: dict[str, list[Row]] = {}
        adapter = folder
        for dtype in ("float32", "bfloat16"):
            with on_vllm(model, folder / dtype, dtype=dtype) as sampler:
                if dtype == "float32":
                    adapter = made_adapter(sampler, float32, folder)
                sampler.load(POLICY, adapter)
                rows[dtype] = rows_of(sampler, requests(QUESTIONS, POLICY))

        def values(learner: LearnerCore, dtype: str) -> np.ndarray:
            return drawn(rows[dtype], learner.logprobs(adapter, rows[dtype]))

        said = {d: drawn(rows[d], [row.logprobs for row in rows[d]]) for d in rows}
        halves, wholes = values(bfloat16, "bfloat16"), values(float32, "bfloat16")
        gaps = {
            "gap_float32": said["float32"] - values(float32, "float32"),
            "gap_bfloat16": said["bfloat16"] - halves,
            "gap_bfloat16_learner_float32": said["bfloat16"] - wholes,
            "rounding": halves - wholes,
        }
    for figure, gap in gaps.items():
        figures[figure] = float(np.abs(gap).mean())
        figures[f"{figure}_max"] = float(np.abs(gap).max())
    tokens = {f"tokens_{dtype}": len(values) for dtype, values in said.items()}
    return figures, tokens | {"model": "email base with heads of 32, vLLM on CPU", "steps": STEPS}
