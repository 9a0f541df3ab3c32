from __future__ import annotations

import pytest

from langchain_art.wire.zero_variance import overlong_penalty
from langchain_art_server.algorithms.credit.batch_plan import (
    exclusion,
    stale,
    unscored,
)
from langchain_art_server.algorithms.credit.candidates import CandidateCall, CandidateRun

CALL = CandidateCall(tokens=3)


def run(*calls: CandidateCall, **fields) -> CandidateRun:
    return CandidateRun(calls or (CALL,), **fields)


@pytest.mark.parametrize(
    ("candidate", "scores", "expected"),
    [
        (run(reward=0.0), (), None),
        (run(reward=None), (), "runs.unscored"),
        (run(reward=None, failed=True), (), "runs.failed"),
        (run(reward=-1.0, failed=True), (), None),  # its user scored it all the same
        (run(CandidateCall(1, reward=0.0)), (), None),
        (run(reward=1.0), ("a",), "runs.unscored"),
        (run(scores={"a": 1.0}), ("a", "b"), "runs.unscored"),
        (run(scores={"a": 1.0, "b": 0.0}), ("a", "b"), None),
        (run(failed=True), ("a",), "runs.failed"),
    ],
)
def test_unscored(candidate: CandidateRun, scores: tuple[str, ...], expected: str | None) -> None:
    assert unscored(candidate, scores) == expected


def test_stale_groups_go_as_one_and_only_for_what_learns() -> None:
    old = run(CandidateCall(1, lag=3))
    assert stale([run(), old], 2) == "groups.stale"
    assert stale([run(), old], 3) is None
    assert stale([run(), old], None) is None
    assert stale([run(CandidateCall(1, lag=9, learns=False))], 0) is None
    assert stale([run(CandidateCall(1, lag=-1))], 0) is None
    assert stale([], 0) is None


@pytest.mark.parametrize(
    ("fields", "run_truncated", "without", "trained"),
    [
        ({}, False, None, None),
        ({"truncated": True}, False, "calls.truncated", None),
        ({}, True, "runs.truncated", None),
        (
            {"truncated": True, "excluded_because": "grammar"},
            True,
            "calls.grammar",
            "calls.grammar",
        ),
        ({"learns": False}, True, "calls.frozen", "calls.frozen"),
        ({"superseded": True}, True, "calls.superseded", "calls.superseded"),
        ({"tokens": 0}, False, "calls.empty", "calls.empty"),
    ],
)
def test_exclusion(fields, run_truncated: bool, without: str | None, trained: str | None) -> None:
    call = CandidateCall(**{"tokens": 3} | fields)
    of = run(call, truncated=run_truncated)
    assert exclusion(of, call, mask_truncated=True) == without
    assert exclusion(of, call, mask_truncated=False) == trained


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0), (12288, 0), (13312, -0.25), (14336, -0.5), (16384, -1), (99999, -1)],
)
def test_the_dapo_vectors(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, 16384, 4096) == penalty
