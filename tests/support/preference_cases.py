"""Pairs of made-up tokens, as batches of the job runner and as the naive loss of the paper."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from langchain_art.wire import PreferenceConfig, TrainRequest, Trajectory, Turn
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.jobs.batch_builder import Batch
from langchain_art_server.jobs.sft_records import weigh_pairs
from tests.support.call_records import record
from tests.support.learner_cases import VOCAB, ignore, naive_gradients, naive_model, quiet

#: The calls of one run: prompt and reply of each.
Side = list[tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Pair:
    chosen: Side
    rejected: Side


def make_pairs(count: int, seed: int, *, turns: int = 1) -> list[Pair]:
    """Replies of 1 to 9 tokens, the last token 0; the sides of a pair have the first prompt."""
    rng = random.Random(seed)

    def drawn(least: int, most: int) -> list[int]:
        return [rng.randrange(1, VOCAB) for _ in range(rng.randrange(least, most))]

    def side(prompt: list[int]) -> Side:
        calls: Side = []
        for _ in range(rng.randrange(1, turns + 1)):
            calls.append((prompt, [*drawn(0, 9), 0]))
            prompt = [*prompt, *calls[-1][1], *drawn(1, 5)]
        return calls

    prompts = [drawn(2, 14) for _ in range(count)]
    return [Pair(side(prompt), side(prompt)) for prompt in prompts]


def batch_of(pairs: Sequence[Pair], config: PreferenceConfig) -> Batch:
    """The batch of a preference job on these pairs, whose tokens have no weights yet."""
    names = [(f"chosen{i}", f"rejected{i}") for i in range(len(pairs))]
    batch = Batch(TrainRequest(policy="p", groups=tuple(names), config=config), 0)
    for pair, ids in zip(pairs, names, strict=True):
        records = {
            f"{name}#{k}": record(f"{name}#{k}", prompt, said)
            for name, side in zip(ids, (pair.chosen, pair.rejected), strict=True)
            for k, (prompt, said) in enumerate(side)
        }
        runs = [
            Trajectory(
                id=name,
                turns=tuple(
                    Turn(call_id=key, messages=()) for key in records if key.startswith(f"{name}#")
                ),
            )
            for name in ids
        ]
        batch.add_group(runs, records)
    batch.settle()
    return batch


class OfCore:
    """A core as the learner that `weigh_pairs` asks for logprobs."""

    def __init__(self, core: LearnerCore) -> None:
        self.core = core

    async def logprobs(self, adapter: Path | None, rows: list[Any]) -> list[list[float]]:
        return [found.tolist() for found in self.core.logprobs(adapter, rows)]

    async def step(self, step: LearnerStep, _progress: Any) -> dict[str, float]:
        return self.core.step(step, quiet)


async def prefer(
    learner: PeftLearner | OfCore,
    parent: Path,
    out: Path,
    step: int,
    pairs: Sequence[Pair],
    config: PreferenceConfig,
) -> dict[str, float]:
    """One preference step, as a job takes it; returns its metrics."""
    batch = batch_of(pairs, config)
    await weigh_pairs(batch, learner, parent, config.beta)  # type: ignore[arg-type]
    request = LearnerStep(parent, out, step, batch.rows, batch.config)
    return await learner.step(request, ignore) | batch.metrics


def naive_dpo(
    model_path: str, adapter: Path, pairs: Sequence[Pair], beta: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of arXiv 2305.18290, eq. 7, in float64: call by call, by autograd."""
    model = naive_model(model_path, adapter)

    def logprob(side: Side) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for prompt, said in side:
            logits_TV = model(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
            logprobs_TV = torch.log(torch.softmax(logits_TV, -1))
            total = total + logprobs_TV[range(len(said)), said].sum()
        return total

    loss = torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        with torch.no_grad(), model.disable_adapter():
            reference = logprob(pair.chosen) - logprob(pair.rejected)
        ratio = logprob(pair.chosen) - logprob(pair.rejected) - reference
        loss = loss - torch.log(torch.sigmoid(beta * ratio)) / len(pairs)
    loss.backward()
    return loss.item(), naive_gradients(model)
