"""The rows for the learner, by the server's own algorithm, out of what was witnessed."""

from __future__ import annotations

from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run
from tests.conformance.suite.checks import trains
from tests.conformance.suite.performance import Performance


def each_token_once(seen: Performance) -> list[Row]:
    """Rows hold every sampled token of every call that may train, once, after what it was shown."""
    learns = {turn.call_id for turn in seen.trajectory.turns if trains(turn, seen)}
    calls = [
        SampledCall(
            call_id=call.id,
            prompt_token_ids=call.prompt_token_ids or [],
            token_ids=call.token_ids or [],
            logprobs=call.logprobs or [],
            temperature=seen.record(call.id)["temperature"],
            advantage=1.0,
        )
        for turn in seen.trajectory.turns
        if turn.call_id in learns and (call := seen.witnessed.get(turn.call_id or ""))
    ]
    rows = rows_of_run(calls)
    free = [[bool(trained) for trained in row.mask] for row in rows]
    for call in calls:
        shown, both = len(call.prompt_token_ids), [*call.prompt_token_ids, *call.token_ids]
        here = slice(shown, len(both))
        holding = [
            index
            for index, row in enumerate(rows)
            if row.token_ids[: len(both)] == both
            and row.logprobs[here] == list(call.logprobs)
            and all(free[index][here])
        ]
        assert holding, f"no row holds {call.call_id}"
        free[holding[0]][here] = [False] * len(call.token_ids)
    assert not any(any(row) for row in free), "a token is trained that nothing sampled"
    return rows
