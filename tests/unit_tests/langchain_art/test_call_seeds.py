import asyncio
import os
import random
from typing import Any

import pytest

from langchain_art.call_seeds import RunSeed


def _asked(text: str = "Who?", id_: str = "call_1") -> dict[str, Any]:
    function = {"name": "find", "arguments": '{"id": 7}'}
    call = {"id": id_, "type": "function", "function": function}
    return {
        "messages": [
            {"role": "user", "content": text},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id_, "content": "Ann"},
        ]
    }


def _seed(run: RunSeed, payload: dict[str, Any], *path: str) -> int:
    with run.seeding(payload, path):
        return payload["seed"]


def test_the_rule_is_the_documented_one() -> None:
    """The seed stays what it is from release to release."""
    assert _seed(RunSeed(0, "train", 3, 1), _asked(), "agent") == 1809654036650906751
    assert _seed(RunSeed(0, 31), _asked()) != _seed(RunSeed(0, "train", 3, 1), _asked())


def test_ids_are_left_out_and_all_else_counts() -> None:
    def seed(*path: str, **changes: Any) -> int:
        return _seed(RunSeed(1), _asked(**changes), *path)

    assert seed() == seed(id_="call_2")
    assert len({seed(), seed(text="Where?"), seed("node"), seed("node", "inner")}) == 4


def test_the_order_of_branches_does_not_count() -> None:
    calls = [("a", "Who?"), ("b", "Who?"), ("a", "Where?"), ("a", "Who?"), ("b", "When?")]

    def seeds(order: list[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
        run, found = RunSeed(2), dict[tuple[str, str], list[int]]()
        for path, text in order:
            found.setdefault((path, text), []).append(_seed(run, _asked(text), path))
        return found

    expected = seeds(calls)
    for number in range(20):
        random.Random(number).shuffle(calls)
        assert seeds(calls) == expected


@pytest.mark.parametrize("kind", [ConnectionError, asyncio.CancelledError])
def test_a_call_asked_again_draws_anew_and_one_that_failed_does_not(
    kind: type[BaseException],
) -> None:
    run, payload = RunSeed(3), _asked()
    with pytest.raises(kind), run.seeding(payload, ()):
        raise kind
    first = _seed(run, _asked())
    assert (payload["seed"] == first) == (kind is ConnectionError)
    assert first != _seed(run, _asked())


def test_calls_at_the_same_time_differ_a_callers_own_seed_stays_a_forked_process_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, first, second = RunSeed(4), _asked(), _asked()
    with run.seeding(first, ()), run.seeding(second, ()):
        assert first["seed"] != second["seed"]
    assert _seed(run, {**_asked(), "seed": 0}) == 0
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with run.seeding(payload := _asked(), ()):
        assert "seed" not in payload


def test_a_copy_and_a_key_in_another_process_go_on_as_the_run_would() -> None:
    run = RunSeed(7, "train", 10**30, 1)
    there = RunSeed.of(run.key)
    assert there.rng.random() == run.rng.random() and there.key == run.key
    assert _seed(there, _asked()) == _seed(run, _asked())
    copy = run.copy()
    second = _seed(run, _asked())
    assert _seed(copy, _asked()) == second != _seed(run, _asked())
    assert run.copy().rng.random() == run.rng.random()
