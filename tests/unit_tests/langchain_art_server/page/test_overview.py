"""Jobs become the curves of fits."""

from __future__ import annotations

from typing import Any

from langchain_art.wire import TrainJob, TrainResult
from langchain_art_server.page.overview import series_of


def job(key: str, version: int, at: float, **changes: Any) -> TrainJob:
    result = TrainResult(policy="p", version=version, metrics={"loss": at}, excluded={})
    given: dict[str, Any] = {
        "id": f"job-{key}",
        "key": key,
        "policy": "p",
        "state": "succeeded",
        "base_version": 3,
        "result": result,
        "created_at": at - 1,
        "finished_at": at,
    }
    return TrainJob(**(given | changes))


def test_jobs_are_sorted_into_fits_by_their_keys() -> None:
    jobs = [
        job("one:p:step:1", 4, 10.0),
        job("mine", 5, 11.0),
        job("one:p:step:2:1", 5, 12.0),
        job("two:of:q:step:9", 5, 13.0),  # of another policy: no fit of this one
        job("a:b:p:step:7", 6, 14.0),
    ]
    found = {(one.policy, one.fit): [s.step for s in one.steps] for one in series_of(jobs)}
    assert found == {("p", "one"): [1, 2], ("p", None): [1, 2], ("p", "a:b"): [7]}
    assert [one.fit for one in series_of(jobs)] == ["a:b", None, "one"]  # the latest first


def test_a_step_that_made_no_version_learned_nothing_and_one_that_failed_is_none() -> None:
    jobs = [
        job("f:p:step:1", 3, 10.0),
        job("f:p:step:2", 4, 11.0),
        job("f:p:step:3", 4, 12.0, state="failed", result=None),
        job("f:p:step:3:1", 4, 13.0, state="running", result=None, finished_at=None),
    ]
    (series,) = series_of(jobs)
    assert [(one.step, one.learned) for one in series.steps] == [(1, False), (2, True)]
