"""Why a step is refused: forward passes that try the usual faults. Child side only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from langchain_art_server.algorithms.loss.logprob_gap import TEMPERATURES, Suspect, suspects_of
from langchain_art_server.algorithms.loss.objective import StepLoss
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft.micro_batches import CountedTokens
from langchain_art_server.backends.peft.training_batch import step_tokens

#: Rows are added until they have this many trained tokens.
TOKENS = 512


def probe(
    rows: Sequence[Row],
    loss: StepLoss,
    base: PreTrainedModel,
    score: Callable[[Sequence[Row], bool], Tensor],
) -> list[Suspect]:
    """Try the usual faults on the rows where learner and sampler are furthest apart.

    Args:
        rows: of the step, each with a trained token; may be empty on one of several ranks.
        loss: of the step, after the first update.
        base: the model; its dtype and device are read.
        score: takes rows, and whether to use the base model, to the logprobs of their trained
            tokens (T), row by row.
    """
    gaps_N = (loss.old_logprobs_N - loss.tokens.sampler_logprobs).abs().cpu().numpy()
    gaps = np.bincount(CountedTokens.of(rows).row_T, weights=gaps_N, minlength=len(rows))
    chosen: list[Row] = []
    for index in np.argsort(-gaps, kind="stable").tolist():
        if sum(sum(row.mask) for row in chosen) < TOKENS:
            chosen.append(rows[index])
    # Rows that differ in temperature alone are one row of the forest.
    heated = [replace(row, temperature=t) for t in TEMPERATURES for row in chosen]
    own_T = score(chosen, False)
    found = step_tokens(chosen, CountedTokens.of(chosen), base)
    heated_T = score(heated, False).reshape(len(TEMPERATURES), len(own_T))
    return suspects_of(
        own_T=own_T,
        base_T=score(chosen, True),
        at_temperatures=dict(zip(TEMPERATURES, heated_T, strict=True)),
        sampler_logprobs_T=found.sampler_logprobs,
        calls_T=found.calls,
        recorded=[row.temperature for row in chosen],
    )
