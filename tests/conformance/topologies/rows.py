"""The rows for the learner, by the server's own algorithm, out of what was witnessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run
from tests.conformance.suite.checks import trains
from tests.conformance.suite.performance import Performance


def each_token_once(seen: Performance) -> list[Row]:
    """The rows of the calls that may train."""
    learns = {turn.call_id for turn in seen.trajectory.turns if trains(turn, seen)}
    calls = [
        SampledCall(
            call_id=call.id,
            prompt_token_ids=call.prompt_token_ids or [],
            token_ids=call.token_ids or [],
            logprobs=call.logprobs or [],
            temperature=seen.record(call.id)["temperature"],
        )
        for turn in seen.trajectory.turns
        if turn.call_id in learns and (call := seen.witnessed.get(turn.call_id or ""))
    ]
    return laid_out(calls)


def laid_out(calls: Sequence[SampledCall]) -> list[Row]:
    """Rows train each sampled token of the calls once, behind what it was shown, and no other."""
    rows = rows_of_run(calls)
    wanted = Counter(
        ((*call.prompt_token_ids, *call.token_ids[: place + 1]), logprob)
        for call in calls
        for place, logprob in enumerate(call.logprobs)
    )
    found = Counter(
        (tuple(row.token_ids[: place + 1]), row.logprobs[place])
        for row in rows
        for place, trained in enumerate(row.mask)
        if trained
    )
    assert found == wanted
    return rows
