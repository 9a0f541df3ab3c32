"""Pairs: tokens that were sampled from stand in for those rendered again; sides are whole."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from langchain_art.wire import PreferenceConfig, TrainRequest, Trajectory, Turn
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.jobs import sft_records
from langchain_art_server.jobs.batch_builder import Batch
from langchain_art_server.jobs.sft_records import share_prompts, weigh_pairs
from langchain_art_server.storage.tables import CallRecord
from tests.support.call_records import record

ASKED = {"role": "user", "content": "When?"}


def run(name: str, *calls: str, asked: dict[str, Any] = ASKED, **more: Any) -> Trajectory:
    turns = tuple(Turn(call_id=call, messages=(asked,), **more) for call in calls)
    return Trajectory(id=name, turns=turns)


def test_what_was_asked_otherwise_keeps_its_own() -> None:
    records = {"w#0": record("w#0", prompt=(7, 8)), "c": record("c", prompt=(5, 6))}
    tool = {"type": "function", "function": {"name": "search"}}
    for other in (
        run("w", "w#0", asked={"role": "user", "content": "Where?"}),
        run("w", "w#0", tools=(tool,)),
    ):
        found = share_prompts([other, run("l", "c")], records, {"c": records["c"]}, 9)
        assert found == records


@pytest.mark.parametrize(("rendered", "shared", "fits"), [(9, 2, True), (2, 9, False)])
def test_the_shared_prompt_decides_whether_a_reply_fits(
    rendered: int, shared: int, fits: bool
) -> None:
    why = None if rendered < 9 else "too_long: 10 tokens > 9"
    own = record("w#0", prompt=range(rendered), excluded_because=why)
    records = {"w#0": own, "c": record("c", prompt=range(shared))}
    found = share_prompts([run("w", "w#0"), run("l", "c")], records, {"c": records["c"]}, 9)
    assert (found["w#0"].excluded_because is None) == fits


def batch_of(
    pairs: list[tuple[Trajectory, Trajectory]], records: Mapping[str, CallRecord]
) -> Batch:
    ids = tuple((chosen.id, rejected.id) for chosen, rejected in pairs)
    batch = Batch(TrainRequest(policy="p", groups=ids, config=PreferenceConfig()), 0)
    for pair in pairs:
        batch.add_group(pair, records)
    batch.settle()
    return batch


def trained(batch: Batch) -> list[tuple[tuple[int, int], list[int]]]:
    return [(owner, row.token_ids) for owner, row in zip(batch.owners, batch.rows, strict=True)]


KNOWN = {
    name: record(name, prompt=(1, 2), said=said)
    for name, said in {"a": (3,), "b": (4,), "c": (5,), "same": (3,)}.items()
}


def test_a_call_that_both_runs_share_counts_on_both_sides() -> None:
    """As in two runs that were forked: else its logprob would be the chosen side's alone."""
    batch = batch_of([(run("w", "a", "b"), run("l", "a", "c"))], KNOWN)
    assert batch.excluded == {}
    assert [owner for owner, _ in trained(batch)] == [(0, 0)] * 2 + [(0, 1)] * 2


class NoLearner:
    """There is nothing to ask it for."""


@pytest.mark.parametrize("why", ["lost", "too_long"])
async def test_a_side_that_lacks_a_reply_excludes_its_pair(why: str) -> None:
    """A side of which some replies are missing would be compared with one that is whole."""
    known = KNOWN | {"long": record("long", excluded_because="too_long: 10 tokens > 9")}
    gone = {"lost": "never-seen", "too_long": "long"}[why]
    batch = batch_of([(run("w", "a", gone), run("l", "c"))], known)
    await weigh_pairs(batch, NoLearner(), "unused", 0.1)  # type: ignore[arg-type]
    assert batch.excluded == {"groups.incomplete_pair": 1, f"calls.{why}": 1}
    assert batch.rows == batch.trained == batch.calls == [] and batch.nodes() == {}
    assert (batch.metrics["pairs_trained"], batch.metrics["runs_trained"]) == (0.0, 0.0)


def test_a_pair_that_is_left_out_is_counted_once_and_leaves_the_others() -> None:
    """A side of which some replies are missing would be compared with one that is whole."""
    empty = Trajectory(id="e", turns=())
    dropped = run("d", "b", excluded_because="retried")
    known = KNOWN | {"long": record("long", excluded_because="too_long: 10 tokens > 9")}
    sides = [
        (empty, empty),
        (run("w", "a"), dropped),
        (run("w", "a", "never-seen"), run("l", "c")),
        (run("w", "a", "long"), run("l", "c")),
        (run("v", "b"), run("l", "c")),
    ]
    batch = batch_of([(one, two.model_copy(update={"id": "x"})) for one, two in sides], known)
    why = {"calls.superseded_retried": 1, "calls.lost": 1, "calls.too_long": 1}
    assert batch.excluded == {"groups.incomplete_pair": 4} | why
    assert batch.trained == ["v", "x"] and batch.metrics["calls_trained"] == 2.0


class Asked:
    """A learner whose logprobs are minus the tokens' ids, halved for the base model."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    async def logprobs(self, adapter: Path | None, rows: list[Row]) -> list[list[float]]:
        self.calls.append([row.token_ids for row in rows])
        scale = 0.5 if adapter is None else 1.0
        return [[-scale * token for token in row.token_ids] for row in rows]


@pytest.mark.parametrize("tokens", [1, 7, 1000])
async def test_the_learner_is_asked_about_a_part_of_a_large_job_at_once(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that makes no turn for long counts as hanging, and a call ends by itself alone."""
    monkeypatch.setattr(sft_records, "ASKED_TOKENS", tokens)
    pairs = [(run("w", "a"), run("l", "c")), (run("v", "b"), run("l", "c"))] * 2
    batch, learner = batch_of(pairs, KNOWN), Asked()
    await weigh_pairs(batch, learner, Path("parent"), 0.1)  # type: ignore[arg-type]
    assert len(learner.calls) == (2 if tokens == 1000 else 8)
    assert batch.metrics["chosen_logprob"] == -3.5 and batch.metrics["rejected_logprob"] == -5.0
    margins = [0.1 * (5 - 3) / 2, 0.1 * (5 - 4) / 2] * 2
    assert batch.metrics["preference_margin"] == pytest.approx(sum(margins) / 4)
    assert [row.weights[-1] > 0 for row in batch.rows] == [True, False] * 4
