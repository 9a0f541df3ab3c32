"""What is read of a reply is the verdict that stands there, or none."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage

from langchain_art.evaluators.ruler.reply_parser import UnusableReply, read
from tests.support.soak import count

Entries = list[dict[str, Any]]

IDS = ["bcd", "fgh", "jkm"]


def whole(entries: Entries) -> str:
    return json.dumps({"scores": entries})


def test_a_tool_call_is_the_verdict() -> None:
    entries = [{"id": one, "explanation": "", "score": n / 4} for n, one in enumerate(IDS)]
    called = {"name": "Verdict", "args": {"scores": entries}, "id": "1"}
    found = read(AIMessage("", tool_calls=[called]), IDS)
    assert {id_: score.value for id_, score in found.items()} == {"bcd": 0, "fgh": 0.25, "jkm": 0.5}
    with pytest.raises(UnusableReply):
        read(AIMessage(whole(entries), tool_calls=[called | {"args": {}}]), IDS)


SCORES = st.one_of(
    st.floats(), st.integers(), st.none(), st.booleans(), st.text(max_size=4), st.floats(0, 1)
)
ENTRIES = st.lists(
    st.fixed_dictionaries(
        {"id": st.sampled_from([*IDS, "1", "", None, 1]), "score": SCORES},
        optional={"explanation": st.one_of(st.text(), st.none(), st.integers())},
    ),
    max_size=5,
)


@pytest.mark.soak
@settings(max_examples=count(70, 200), deadline=None)
@given(
    st.lists(st.one_of(ENTRIES, st.text(max_size=30)), min_size=1, max_size=3), st.integers(0, 9)
)
def test_what_is_read_is_what_stands_there(pieces: list[Any], cut: int) -> None:
    """Against a naive reading: its ids are exactly the runs, all in range, all alike."""
    text = " ".join(one if isinstance(one, str) else whole(one) for one in pieces)
    text = text[: len(text) - cut]
    try:
        found = read(AIMessage(text), IDS)
    except UnusableReply:
        if not cut and len(pieces) == 1 and isinstance(pieces[0], list):
            assert not is_verdict(pieces[0])
        return
    stated = [
        {one["id"]: one["score"] for one in piece}
        for piece in pieces
        if isinstance(piece, list) and is_verdict(piece)
    ]
    assert {id_: score.value for id_, score in found.items()} in stated
    assert sorted(found) == sorted(IDS)


def is_verdict(entries: Entries) -> bool:
    return sorted(str(one["id"]) for one in entries) == sorted(IDS) and all(
        type(one["score"]) in (int, float) and 0 <= one["score"] <= 1 for one in entries
    )
