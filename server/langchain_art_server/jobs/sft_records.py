"""Records for supervised steps: of calls that were sampled here, and of other replies; pairs.

A recorded call is trained with its own tokens, whichever policy sampled it and however (greedy,
truncated, under a grammar). A turn without a record, of another model or of an imported
conversation, is tokenized with the model's chat template.

Pairs are for direct preference optimization (DPO). The loss of a pair is ``-log sigmoid(m)`` with
the margin ``m = beta ((w - w_ref) - (l - l_ref))``; ``w`` and ``l`` are the policy's
log-probabilities of the chosen and of the rejected reply, summed over their tokens, ``_ref`` those
of the base model (arXiv 2305.18290, eq. 7). Its gradient is

    -beta sigmoid(-m) (∇w - ∇l)

so at the weights before the step it is that of ``Σ_t weight_t (-logprob_t)``, with
``beta sigmoid(-m) / pairs`` as the weight of each chosen token, and minus that of each rejected
one. No pair has to be in one micro-batch, or on one rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import numpy as np

from langchain_art.errors import InvalidRequest
from langchain_art.wire import CallTags, Trajectory
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import Demonstration
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.jobs.batch_builder import Batch
from langchain_art_server.storage.tables import CallRecord


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities of the replies of one pair, in nats, summed over their tokens."""

    chosen: float
    rejected: float
    base_chosen: float
    base_rejected: float

    def margin(self, beta: float) -> float:
        """``m`` above, without a unit."""
        return beta * (self.chosen - self.base_chosen - self.rejected + self.base_rejected)


def preference_weights(
    pairs: Sequence[PairLogprobs], beta: float
) -> tuple[list[float], dict[str, float]]:
    """The weight of the tokens of each pair's chosen reply, and metrics. There is a pair.

    Metrics are ``preference_loss``, the step's before it; ``preference_margin``, the mean of m;
    ``preference_accuracy``, the fraction of pairs with m above 0, and ``preference_order``, of
    those whose chosen reply is the likelier one; mean logprobs of both kinds of replies, in nats.
    """
    margins = [pair.margin(beta) for pair in pairs]
    return [beta * math.exp(-np.logaddexp(0, margin)) / len(pairs) for margin in margins], {
        "preference_loss": fmean(float(np.logaddexp(0, -margin)) for margin in margins),
        "preference_margin": fmean(margins),
        "preference_accuracy": fmean(float(margin > 0) for margin in margins),
        "preference_order": fmean(float(pair.chosen > pair.rejected) for pair in pairs),
        "chosen_logprob": fmean(pair.chosen for pair in pairs),
        "rejected_logprob": fmean(pair.rejected for pair in pairs),
    }


async def demonstrations(
    runs: Sequence[Trajectory],
    records: Mapping[str, CallRecord],
    learner: PeftLearner,
    max_len: int,
) -> tuple[list[Trajectory], dict[str, CallRecord]]:
    """The runs with a record for every turn that has a reply.

    The learner tokenizes the turns that are not in `records` (by call id). Turns with more than
    `max_len` tokens of prompt and reply together are excluded.

    Returns:
        The runs, in which each turn with a record has a call id; and the records by these ids, all
        at temperature 1 and over the whole vocabulary, as the likelihood is computed.

    Raises:
        InvalidRequest: a turn cannot be tokenized; names the run and the turn.
    """
    changed: list[Trajectory] = []
    known: dict[str, CallRecord] = {}
    missing: list[tuple[Trajectory, int]] = []
    for run in runs:
        turns = list(run.turns)
        for index, turn in enumerate(turns):
            record = records.get(turn.call_id or "")
            if record is not None:
                known[record.id] = replace(
                    record, temperature=1.0, drawn_from=b"", excluded_because=None
                )
            elif turn.reply is not None and turn.excluded_because is None:
                turns[index] = turn.model_copy(update={"call_id": f"{run.id}#{index}"})
                missing.append((run, index))
        changed.append(run.model_copy(update={"turns": tuple(turns)}))
    given = [
        Demonstration(run.prompt(index), list(run.turns[index].tools), run.turns[index].reply or {})
        for run, index in missing
    ]
    found = await learner.tokenize(given) if given else []
    for (run, index), shown, tokens in zip(missing, given, found, strict=True):
        if isinstance(tokens, str):
            raise InvalidRequest(f"run {run.id!r}, turn {index}: {tokens}", param="groups")
        name, turn = f"{run.id}#{index}", run.turns[index]
        known[name] = CallRecord(
            id=name,
            created_at=turn.started_at or 0.0,
            policy=None,
            version=None,
            model=turn.model or "",
            tags=CallTags(),
            request={"messages": shown.messages, "tools": shown.tools},
            reply=shown.reply,
            prompt_token_ids=tokens.prompt_token_ids,
            token_ids=tokens.token_ids,
            logprobs=[0.0] * len(tokens.token_ids),
            temperature=1.0,
            finish_reason="stop",
            excluded_because=why_too_long(tokens.prompt_token_ids, tokens.token_ids, max_len),
            latency=turn.latency or 0.0,
        )
    return changed, known


def why_too_long(prompt: Sequence[int], reply: Sequence[int], max_len: int) -> str | None:
    """Reason for which a turn with so many tokens is excluded; None: it is not."""
    length = len(prompt) + len(reply)
    return f"too_long: {length} tokens > {max_len}" if length > max_len else None


#: Most tokens that the learner is asked about at once. Between two calls it is seen to be alive
#: (`hang_seconds`), and a cancelled job stops.
ASKED_TOKENS = 65_536
#: The rows of the chosen run, and those of the rejected one.
_Pair: TypeAlias = tuple[list[Row], list[Row]]


def share_prompts(
    runs: Sequence[Trajectory],
    records: Mapping[str, CallRecord],
    sampled: Mapping[str, CallRecord],
    max_len: int,
) -> dict[str, CallRecord]:
    """The records, with the tokens that were sampled from in place of what is rendered again.

    A reply that was written by hand answers the very prompt of the call that it stands beside: if
    messages and tools are equal, it gets that call's prompt tokens. `runs` are one pair, `records`
    and `max_len` those of `demonstrations`; of `records`, the server recorded `sampled`.
    """
    prompts = {
        _asked(run, index): sampled[turn.call_id].prompt_token_ids
        for run in runs
        for index, turn in enumerate(run.turns)
        if turn.call_id is not None and turn.call_id in sampled
    }
    shared = dict(records)
    for run in runs:
        for index, turn in enumerate(run.turns):
            record, found = records.get(turn.call_id or ""), prompts.get(_asked(run, index))
            if record is not None and record.id not in sampled and found is not None:
                why = why_too_long(found, record.token_ids, max_len)
                shared[record.id] = replace(record, prompt_token_ids=found, excluded_because=why)
    return shared


def _asked(run: Trajectory, index: int) -> str:
    """Equal for messages and tools that differ in the order of their fields alone."""
    shown = run.prompt(index), [dict(tool) for tool in run.turns[index].tools]
    return json.dumps(shown, sort_keys=True)


@dataclass(frozen=True)
class WeighedPairs:
    """The pairs that a step learns from, and what the base model says of them."""

    pairs: list[_Pair]
    base: list[tuple[float, float]]
    """Logprobs of both sides, by pair, in nats."""
    beta: float

    async def metrics_after(self, learner: PeftLearner, adapter: Path) -> dict[str, float]:
        """Metrics under the version that the step made, as ``…_after``."""
        _, metrics = await self.weights(learner, adapter)
        return {f"{name}_after": value for name, value in metrics.items()}

    async def weights(
        self, learner: PeftLearner, adapter: Path
    ) -> tuple[list[float], dict[str, float]]:
        """`preference_weights` under an adapter."""
        now = await _logprobs(self.pairs, learner, adapter)
        both = zip(now, self.base, strict=True)
        return preference_weights([PairLogprobs(*one, *base) for one, base in both], self.beta)


async def weigh_pairs(
    batch: Batch, learner: PeftLearner, parent: Path, beta: float
) -> WeighedPairs | None:
    """Give the tokens of the batch's rows their weights: those of pairs, which are all whole.

    Metrics of the pairs, before the step, go to the batch's. None: there is no pair.
    """
    found: dict[int, _Pair] = {}
    for (group, side), row in zip(batch.owners, batch.rows, strict=True):
        found.setdefault(group, ([], []))[side].append(row)
    pairs = list(found.values())
    batch.metrics["pairs_trained"] = float(len(pairs))
    if not pairs:
        return None
    weighed = WeighedPairs(pairs, await _logprobs(pairs, learner, None), beta)
    weights, metrics = await weighed.weights(learner, parent)
    batch.rows = [
        replace(row, weights=[factor * trained for trained in row.mask])
        for pair, weight in zip(pairs, weights, strict=True)
        for rows, factor in zip(pair, (weight, -weight), strict=True)
        for row in rows
    ]
    batch.metrics |= metrics | {"loss": metrics["preference_loss"]}
    return weighed


async def _logprobs(
    pairs: Sequence[_Pair], learner: PeftLearner, adapter: Path | None
) -> list[tuple[float, float]]:
    """Logprobs of the chosen and of the rejected replies of each pair."""
    found: list[tuple[float, float]] = []
    for some in _parts(pairs):
        rows = [row for pair in some for side in pair for row in side]
        given = zip(rows, await learner.logprobs(adapter, rows), strict=True)
        sums = (
            sum(one for one, trained in zip(logprobs, row.mask, strict=True) if trained)
            for row, logprobs in given
        )
        found += [
            (sum(islice(sums, len(chosen))), sum(islice(sums, len(rejected))))
            for chosen, rejected in some
        ]
    return found


def _parts(pairs: Iterable[_Pair]) -> Iterator[list[_Pair]]:
    """Pairs of `ASKED_TOKENS` together, or a single one."""
    part, tokens = list[_Pair](), 0
    for pair in pairs:
        its = sum(len(row.token_ids) for side in pair for row in side)
        if part and tokens + its > ASKED_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(pair)
        tokens += its
    yield part
