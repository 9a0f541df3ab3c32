"""What was thought and what was said: apart, piece by piece as at once, with nothing lost."""

from hypothesis import given
from hypothesis import strategies as st

from langchain_art_server.gateway.chat.dialect import BEGIN, END, Thoughts, split

PARTS = st.sampled_from([BEGIN, END, "<think", "</thin", "<", "k>", "a", " b\n", "</think"])


@given(st.lists(PARTS, max_size=8).map("".join), st.lists(st.integers(1, 6), max_size=60))
def test_pieces_are_what_the_whole_is(reply: str, sizes: list[int]) -> None:
    thoughts, pieces, at = Thoughts(), list[tuple[str, str]](), 0
    for size in [*sizes, len(reply)]:
        pieces += thoughts.feed(reply[at : at + size])
        at += size
    pieces += thoughts.rest()
    kinds = [kind for kind, _ in pieces]
    assert kinds == sorted(kinds, reverse=True)  # what was thought, and then the text
    thought, text = split(reply)
    assert "".join(t for kind, t in pieces if kind == "text") == text
    assert (thought is None) == ("thought" not in kinds)
    assert "".join(t for kind, t in pieces if kind == "thought") == (thought or "")
    if thought is None:
        assert text == reply
    elif END in reply[len(BEGIN) :]:
        assert f"{BEGIN}{thought}{END}{text}" == reply
    else:
        assert (BEGIN + thought, text) == (reply, "")
