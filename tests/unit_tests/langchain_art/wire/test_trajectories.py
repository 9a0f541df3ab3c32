from typing import Any

import pytest
from pydantic import ValidationError

from langchain_art.wire import Trajectory, TrajectoryGroup, Turn, Usage
from langchain_art.wire.identifiers import unwritable
from langchain_art.wire.trajectories import MAX_RUN_BYTES, storable

LONE = "caf\udce9"


def test_the_total_return_is_the_runs_and_its_calls_but_what_the_graph_threw_away() -> None:
    for own, turns, total in ((None, [None], None), (None, [0.5], 0.5), (1.0, [0.25, None], 1.25)):
        told = tuple(Turn(reward=reward) for reward in turns)
        assert Trajectory(id="t", turns=told, reward=own).total_return == total
    thrown = Turn(reward=9.0, excluded_because="retried")
    assert Trajectory(id="t", turns=(thrown,)).total_return is None
    assert Trajectory(id="t", turns=(thrown, Turn(reward=1.0)), reward=1.0).total_return == 2.0


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"a": [1, {"b": LONE}]}, "a[1].b: a text with the lone surrogate '\\udce9', which UTF-8"),
        ({"a": ({"n": -(10**5000)},)}, "a[0].n: an integer of 16610 bits"),
        ([b"\xff"], "[0]: "),
        (Turn(reply={"role": "assistant", "content": LONE}), "reply.content: a text with"),
    ],
)
def test_the_place_of_what_json_does_not_have(value: Any, why: str) -> None:
    assert (unwritable(value) or "").startswith(why)


@pytest.mark.parametrize(
    "value", [None, float("nan"), object(), {1: 2.5}, 10**4000, "é😀\0", [{"a": (1, 2)}], set("a")]
)
def test_what_json_has_or_what_becomes_a_text(value: Any) -> None:
    assert unwritable(value) is None


def stored(run: Trajectory) -> Trajectory:
    found = storable(run)
    assert Trajectory.model_validate_json(found.model_dump_json(fallback=str)) == found
    assert len(found.model_dump_json()) <= MAX_RUN_BYTES
    assert storable(found) is found
    return found


def nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


IN_ITSELF: list[Any] = []
IN_ITSELF.append(IN_ITSELF)


@pytest.mark.parametrize("field", ["input", "metadata"])
@pytest.mark.parametrize("value", [IN_ITSELF, *map(nested, [*range(180, 204), 2000])])
def test_a_value_that_is_nested_too_deep_is_left_out(value: Any, field: str) -> None:
    found = stored(run := Trajectory(id="t", reward=1.0).model_copy(update={field: {"a": value}}))
    if found is not run:
        assert (found.status, found.reward) == ("failed", 1.0)
        assert (found.error or "").startswith((field, "the value"))
    TrajectoryGroup.model_validate_json(
        f'{{"id": "g", "trajectories": [{found.model_dump_json()}]}}'
    )


def test_only_what_is_to_blame_is_left_out() -> None:
    good = Turn(call_id="a", messages=({"role": "user", "content": "x"},), reward=1.0)
    turns = (good, good.model_copy(update={"call_id": "b", "messages": ({"content": LONE},)}))
    run = Trajectory(
        id="t",
        turns=turns,
        input={"q": LONE},
        output={"a": 1},
        metadata={"file": LONE, "step": 3, LONE: 1},
        scores={"good": 1.0, LONE: 2.0},
        reward=0.5,
        error=LONE,
    )
    found = stored(run)
    assert (found.status, found.reward, found.scores) == ("failed", 0.5, {"good": 1.0})
    assert (found.input, found.output, found.metadata) == (None, {"a": 1}, {"step": 3})
    assert found.turns[0] == good
    assert (found.turns[1].call_id, found.turns[1].reward) == ("b", 1.0)
    assert found.turns[1].messages == ()
    assert (found.error or "").startswith("caf\\udce9 (turns[1].messages[0].content: a text with")


@pytest.mark.parametrize("field", ["input", "output", "metadata", "turns", "error"])
def test_a_run_that_is_too_large_loses_its_largest_parts(field: str) -> None:
    large = "x" * MAX_RUN_BYTES
    value: dict[str, Any] = {
        "metadata": {"a": large},
        "turns": (Turn(call_id="a", messages=({"content": large},)),),
    }
    run = Trajectory(id="t", **({"output": {"a": 1}} | {field: value.get(field, large)}))
    found = stored(run)
    assert (found.status, len(found.turns)) == ("failed", len(run.turns))
    assert found.output == (None if field == "output" else {"a": 1})
    assert f"{field}: 16,777" in (found.error or "")


def test_counts_of_tokens_fit_into_a_database() -> None:
    for name in ("prompt_tokens", "completion_tokens"):
        with pytest.raises(ValidationError, match="less than or equal to"):
            Usage(**{"prompt_tokens": 1, "completion_tokens": 1} | {name: 2**31})
