"""Random trees of calls, and the naive common prefix."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall
from langchain_art_server.storage.tables import CallRecord


def common(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@st.composite
def trees_of_calls(draw: st.DrawFn) -> list[SampledCall]:
    """Calls whose prompts grow from earlier calls, cut short, changed or fresh, over few ids."""
    ids = st.integers(0, 2)
    calls: list[SampledCall] = []
    for index in range(draw(st.integers(0, 10))):
        history: list[int] = []
        if calls and draw(st.booleans()):
            parent = draw(st.sampled_from(calls))
            history = [*parent.prompt_token_ids, *parent.token_ids]
            if draw(st.integers(0, 4)) == 0:
                history = history[: draw(st.integers(0, len(history)))]
        prompt = history + draw(st.lists(ids, min_size=0 if history else 1, max_size=3))
        reply = draw(st.lists(ids, max_size=4))
        calls.append(
            SampledCall(
                f"c{index}",
                prompt,
                reply,
                [-(index * 10 + i) / 256 for i in range(len(reply))],
                temperature=draw(st.sampled_from([1.0, 1.0, 0.5])),
                advantage=0.25,
            )
        )
    return calls


def sampled_tokens(calls: Iterable[SampledCall | CallRecord]) -> Counter[tuple[Any, ...]]:
    """Each token of these calls with all that stood before it."""
    return Counter(
        ((*call.prompt_token_ids, *call.token_ids[:i]), token, call.logprobs[i], call.temperature)
        for call in calls
        for i, token in enumerate(call.token_ids)
    )


def trained_tokens(rows: Iterable[Row]) -> Counter[tuple[Any, ...]]:
    """Each token that these rows train, likewise."""
    return Counter(
        (tuple(row.token_ids[:i]), token, row.logprobs[i], row.temperature)
        for row in rows
        for i, (token, trained) in enumerate(zip(row.token_ids, row.mask, strict=True))
        if trained
    )
