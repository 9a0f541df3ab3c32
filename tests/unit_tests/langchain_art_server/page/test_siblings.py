"""Where two runs part is where a reader of both would say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from langchain_art.wire import Trajectory, Turn
from langchain_art_server.page.siblings import Parting, explanations, parting

Said = list[tuple[str, str]]
CALLS = st.lists(st.tuples(st.sampled_from("wc"), st.text("ab", max_size=3)), max_size=4)


def run(said: Said) -> Trajectory:
    turns = [Turn(node=n, reply={"role": "assistant", "content": text}) for n, text in said]
    return Trajectory(id="t", turns=tuple(turns))


def naive(one: Said, other: Said) -> Parting | None:
    for index in range(5):
        mine = one[index] if index < len(one) else None
        its = other[index] if index < len(other) else None
        if mine == its:
            continue
        same = 0
        if mine and its:
            while mine[1][: same + 1] == its[1][: same + 1] and same < min(
                len(mine[1]), len(its[1])
            ):
                same += 1
        return Parting(turn=index, characters=same)
    return None


@given(CALLS, CALLS)
def test_parting_is_the_first_difference(one: Said, other: Said) -> None:
    assert parting(run(one), run(other)) == naive(one, other)
    assert parting(run(one), run(one)) is None


def test_explanations_are_texts_alone() -> None:
    for judged, found in (
        ({"ruler": "why", "gate": None, "n": 3, "e": ""}, {"ruler": "why"}),
        ("text", {}),
        (None, {}),
    ):
        assert explanations(Trajectory(id="t", metadata={"judged": judged})) == found
    assert explanations(Trajectory(id="t")) == {}
