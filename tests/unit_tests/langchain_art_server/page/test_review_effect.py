"""Each effect is foreseen where it holds, and nothing is said to teach that does not."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_art.errors import NotFound
from langchain_art.review.train import plan
from langchain_art.wire import HUMAN_REWARD, Review, Trajectory, Turn
from langchain_art_server.page.review_effect import effect_of

REPLY = {"role": "assistant", "content": "sampled"}
RUN = Trajectory(
    id="t",
    scenario="s",
    turns=(
        Turn(call_id="mine", model="tiny@3", reply=REPLY),
        Turn(call_id="foreign", model="gpt", ours=False, reply=REPLY),
        Turn(call_id="silent", model="tiny@3"),
        Turn(call_id="gone", model="tiny@3", reply=REPLY, excluded_because="retried"),
    ),
)
RUNS = {
    "t": RUN,
    "u": Trajectory(
        id="u",
        turns=(Turn(call_id="x", model="tiny@3"), Turn(call_id="y", node="n", model="tiny@3")),
    ),
    "v": Trajectory(id="v"),
}


def review(**said: Any) -> Review:
    about = {"id": "r", "source": "page", "trajectory": "t", "kind": "reward", "at": 5.0}
    return Review(**{**about, "name": "human_reward", "reviewer": "ann", **said})


def other(value: float | None, at: float = 1.0, run: str = "u", **said: Any) -> Review:
    return review(id=f"{run}-{at}", trajectory=run, value=value, at=at, **said)


def corrected(call: str, text: str) -> Review:
    reply = {"role": "assistant", "content": text}
    return review(kind="correction", name="c", call_id=call, correction=reply)


@pytest.mark.parametrize(
    ("said", "others", "effect"),
    [
        (corrected("mine", "better"), [], "teaches_preference"),
        (corrected("mine", "sampled"), [], "unchanged"),
        (corrected("foreign", "better"), [], "other_model"),
        (corrected("silent", "better"), [], "no_reply"),
        (review(kind="score", value=1.0), [other(0.0)], "teaches_reward"),
        (review(kind="score", name="h", value=1.0), [other(0.0, name="h")], "is_kept"),
        (review(name="mine", value=1.0), [other(0.0, name="mine")], "is_kept"),
        (review(), [other(0.0)], "is_taken_back"),
        (review(value=1.0, call_id="mine"), [other(0.0)], "alone"),
        (review(value=1.0, call_id="mine"), [other(0.0, call_id="y")], "alone"),
        (review(value=1.0, call_id="mine"), [other(1.0, call_id="x")], "all_equal"),
        (review(value=1.0, call_id="mine"), [other(0.0, call_id="x")], "teaches_reward"),
        (review(value=1.0, call_id="gone"), [other(0.0, call_id="x")], "superseded"),
        (review(value=1.0), [], "alone"),
        (review(value=1.0), [other(None)], "alone"),
        (review(value=1.0), [other(0.0, at=1.0), other(None, at=2.0)], "alone"),
        (review(value=1.0), [other(0.0, call_id="x")], "alone"),
        (review(value=1.0), [other(0.0, run="t")], "alone"),
        (review(value=1.0), [other(1.0)], "all_equal"),
        (review(value=1.0), [other(1.0), other(0.0, run="v")], "teaches_reward"),
    ],
)
def test_effects(said: Review, others: list[Review], effect: str) -> None:
    found = effect_of(said, RUNS, others, {"tiny"})
    assert found.effect == effect
    assert found.policy == ("tiny" if effect.startswith("teaches") else None)
    if said.correction is None and said.name == HUMAN_REWARD:
        runs = {name: one.model_copy(update={"scenario": "s"}) for name, one in RUNS.items()}
        learned = plan([*others, said], runs)
        taught = {*learned.rewards, *learned.turns}
        assert ((said.call_id or "t") in taught) == (effect == "teaches_reward")


def test_a_run_that_no_policy_made_or_without_a_scenario_teaches_nothing() -> None:
    said = review(value=1.0)
    assert effect_of(said, RUNS, [other(0.0)], {"another"}).effect == "other_model"
    bare = RUN.model_copy(update={"scenario": None})
    assert effect_of(said, RUNS | {"t": bare}, [other(0.0)], {"tiny"}).effect == "no_scenario"
    with pytest.raises(NotFound, match="nowhere"):
        effect_of(review(value=1.0, call_id="nowhere"), RUNS, [], {"tiny"})


def test_a_revision_is_of_the_same_reviewer_thing_and_name() -> None:
    said = review(value=1.0)
    before = other(0.0, run="t")
    assert effect_of(said, RUNS, [before], {"tiny"}).revises == before.id
    for changed in ({"reviewer": "bob"}, {"name": "n"}, {"call_id": "mine"}, {"source": "api"}):
        assert effect_of(said, RUNS, [other(0.0, run="t", **changed)], {"tiny"}).revises is None
