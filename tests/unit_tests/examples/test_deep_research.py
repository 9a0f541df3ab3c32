import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.deep_research.environment import (
    RECORD,
    Corpus,
    Scenario,
    make_world,
    reward,
    split_pairs,
)

SCENARIO = Scenario("test-0", "test", "?", (("Arlen", "river"), ("Brom", "mayor")), ("Tay", "Ann"))


def test_a_search_for_town_and_topic_finds_the_record() -> None:
    world = make_world(3)
    for (town, topic), fact in world.facts.items():
        hits = world.corpus.search(f"{town} {topic}")
        assert f"{RECORD}: the {topic} of {town} is {fact}." in hits
        assert 2 <= len(hits) <= 3
        assert sum(hit.startswith(RECORD) for hit in hits) == 1
        assert len({hit.split()[-1] for hit in hits}) == len(hits)


@given(st.text())
def test_any_query_gets_an_answer(query: str) -> None:
    corpus = Corpus(["Record: the river of Arlen is Tay."])
    assert isinstance(corpus.search(query), list)
    assert corpus.search('"ARLEN" OR (river*') == []
    assert corpus.search("ARLEN, river?") == ["Record: the river of Arlen is Tay."]


def test_no_pair_is_on_both_sides_and_questions_keep_to_theirs() -> None:
    split, world = split_pairs(), make_world(0)
    assert not set(split["train"]) & set(split["test"])
    for side in ("train", "test"):
        scenarios = world.scenarios(side, 50)
        assert scenarios == make_world(0).scenarios(side, 50)
        for one in scenarios:
            assert set(one.pairs) <= set(split[side])
            assert one.facts == tuple(world.facts[pair] for pair in one.pairs)
            assert all(f"the {topic} of {town}" in one.question for town, topic in one.pairs)


@pytest.mark.parametrize(
    ("report", "worth"),
    [
        ("Tay, Ann", 1.0),
        ("tay and Ann.", 1.0),
        ("Ann, Tay", 0.0),
        ("Tay", 0.5),
        ("Wye, Ann", 0.5),
        ("Tay, Ann, Wye", 0.0),
        ("", 0.0),
    ],
)
def test_a_report_is_worth_the_facts_in_their_place(report: str, worth: float) -> None:
    assert reward(SCENARIO, report) == worth
