"""Records for a supervised step (SFT): of calls that were sampled here, and of other replies.

A recorded call is trained with its own tokens, whichever policy sampled it and however (greedy,
truncated, under a grammar). A turn without a record, of another model or of an imported
conversation, is tokenized with the model's chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from langchain_art.errors import InvalidRequest
from langchain_art.wire import CallTags, Trajectory
from langchain_art_server.backends.base import Demonstration, Learner
from langchain_art_server.storage.tables import CallRecord


async def demonstrations(
    runs: Sequence[Trajectory],
    records: Mapping[str, CallRecord],
    learner: Learner,
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
