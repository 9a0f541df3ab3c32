"""The engine's journal as the witness, and the learner's rows out of what was witnessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run
from tests.conformance.suite.checks import trains
from tests.conformance.suite.harness import Served
from tests.conformance.suite.performance import Performance
from tests.conformance.suite.witness import Witnessed
from tests.support.live_server import RuleServer


def served_by(server: RuleServer) -> Served:
    return Served(server.base_url, server.policy)


def witnessed(lines: Iterable[dict[str, Any]]) -> dict[str, Witnessed]:
    """call id -> what the journal's lines say."""
    names = ("id", "messages", "prompt_token_ids", "token_ids", "logprobs")
    return {line["id"]: Witnessed(**{name: line[name] for name in names}) for line in lines}


class JournalWitness:
    """What the engine says it was asked and drew."""

    def __init__(self, server: RuleServer) -> None:
        self._server, self._read = server, 0

    def calls(self) -> list[Witnessed]:
        """The calls that ended since it was last asked."""
        lines = self._server.witnessed()[self._read :]
        self._read += len(lines)
        return list(witnessed(lines).values())


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
