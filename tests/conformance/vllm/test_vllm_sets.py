"""vLLM and the learner agree on tokens that were drawn under a grammar."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from langchain_art_server.algorithms.sequences.token_sets import single, unpack
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.vllm.sampler import VllmSampler
from tests.support.learner_cases import gaps
from tests.support.tiny_models import CLOCK, WEATHER, ask
from tests.support.vllm_sampling import OF_THE_SAMPLER, chat

pytestmark = OF_THE_SAMPLER


@pytest.mark.parametrize("heat", [1.0, 0.6])
async def test_the_learner_renormalises_over_what_a_grammar_allowed(
    vllm_sampler: VllmSampler, vllm_model: Path, vllm_adapters: dict[str, Path], heat: float
) -> None:
    schema = WEATHER["function"]["parameters"]
    kinds: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"tools": [WEATHER, CLOCK], "tool_choice": "required"},
    ]
    name, adapter = next(iter(vllm_adapters.items()))
    requests = [
        ask(
            "mail",
            adapter=name,
            seed=seed,
            temperature=heat,
            max_tokens=80,
            stream=seed > 2,
            **kind,
        )
        for seed in range(5)
        for kind in kinds
    ]
    replies = await asyncio.gather(*(chat(vllm_sampler, request) for request in requests))
    assert {reply.excluded_because for reply in replies} == {None}
    found = gaps(LearnerCore(str(vllm_model), "cpu", "float32"), adapter, replies, heat)
    gap = f"vLLM and learner: max {found.max():.2e}, mean {found.mean():.2e} nats"
    logging.getLogger(__name__).warning(gap)
    assert found.max() <= 1e-5
    for reply in replies:
        sets = unpack(reply.drawn_from)
        assert len(sets) == len(reply.token_ids)
        assert any(one == single(token) for one, token in zip(sets, reply.token_ids, strict=True))
        assert min(reply.logprobs) < -0.1  # and some were chosen
