"""Which replica a call goes to."""

from __future__ import annotations

from langchain_art_server.backends.replicas.sampler import (
    SPREAD_CALLS,
    SPREAD_FACTOR,
    StickyRuns,
)


def test_a_run_stays_and_new_runs_go_to_the_least_loaded() -> None:
    runs = StickyRuns()
    assert [runs.choose(f"r{i}", {0: 0, 1: 0, 2: 0}) for i in range(6)] == [0, 1, 2, 0, 1, 2]
    assert runs.choose("r1", {0: 0, 1: 5, 2: 0}) == 1
    assert runs.choose("new", {0: 4, 1: 5, 2: 3}) == 2


def test_a_run_leaves_a_replica_that_is_far_more_loaded_and_stays_with_the_other() -> None:
    runs, least = StickyRuns(), 3
    assert runs.choose("r", {0: 0, 1: 0}) == 0
    bound = SPREAD_FACTOR * least + SPREAD_CALLS
    assert runs.choose("r", {0: bound, 1: least}) == 0
    assert runs.choose("r", {0: bound + 1, 1: least}) == 1
    assert runs.choose("r", {0: 0, 1: least}) == 1


def test_a_run_leaves_a_replica_that_is_gone() -> None:
    runs = StickyRuns()
    assert runs.choose("r", {0: 0, 1: 0}) == 0
    assert runs.choose("r", {1: 8}) == 1
    assert runs.choose("r", {0: 0, 1: 8}) == 1, "it is back, without the run's prompts"


def test_calls_of_no_run_go_to_the_least_loaded_and_none_is_remembered() -> None:
    runs = StickyRuns()
    assert [runs.choose("", {0: 1, 1: 0}) for _ in range(3)] == [1, 1, 1]
    assert [runs.choose("", {0: 0, 1: 0}) for _ in range(4)] == [0, 1, 0, 1]
    assert not runs._homes


def test_only_so_many_runs_are_remembered() -> None:
    runs = StickyRuns(most_runs=2)
    homes = [runs.choose(name, {0: 0, 1: 0}) for name in ("a", "b", "c")]
    assert homes == [0, 1, 0] and list(runs._homes) == ["b", "c"]
