"""Each pick puts first what it says, and leaves out what it cannot order."""

from __future__ import annotations

from langchain_art.wire import Trajectory
from langchain_art.wire.picks import ranked


def run(id_: str, reward: float | None = None, scenario: str | None = None, **scores: float):
    return Trajectory(id=id_, reward=reward, scenario=scenario, scores=scores)


def ids(runs: list[Trajectory]) -> list[str]:
    return [one.id for one in runs]


def test_lowest_puts_the_lowest_return_first_and_leaves_out_what_was_not_scored() -> None:
    runs = [run("a", 0.5), run("b"), run("c", -1.0), run("d", 0.0)]
    assert ids(ranked(runs, "lowest")) == ["c", "d", "a"]


def test_disagreement_compares_scores_by_their_ranks() -> None:
    runs = [
        run("agreed", ruler=0.1, tests=0.0),
        run("split", ruler=0.9, tests=-5.0),
        run("middle", ruler=0.5, tests=50.0),
        run("one-score", ruler=0.2),
    ]
    assert ids(ranked(runs, "disagreement"))[0] == "split"
    assert "one-score" not in ids(ranked(runs, "disagreement"))


def test_uncertain_puts_scenarios_first_whose_runs_fare_differently() -> None:
    runs = [run("a1", 1.0, "a"), run("a2", 1.0, "a"), run("b1", 0.0, "b"), run("b2", 1.0, "b")]
    found = ids(ranked([*runs, run("alone", 0.0, "c"), run("none", None, "b")], "uncertain"))
    assert set(found[:2]) == {"b1", "b2"} and set(found[2:]) == {"a1", "a2"}


def test_random_is_the_same_each_time_and_not_the_order_that_was_given() -> None:
    runs = [run(f"r-{i}") for i in range(50)]
    found = ids(ranked(runs, "random"))
    assert found == ids(ranked(runs[::-1], "random"))
    assert sorted(found) == sorted(ids(runs)) and found != ids(runs)
