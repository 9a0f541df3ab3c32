"""Temporal Clue: the detective learns whose clue counts; a hosted model answers as well."""

import re
from pathlib import Path
from typing import Any

import pytest

from examples.temporal_clue.environment import QUESTIONS, puzzles
from examples.temporal_clue.train import DEMO, make_rollout
from tests.support.examples import HostedModel, evaluation, server_of, short_fit
from tests.support.soak import in_soak


# `test_codenames.py` has a fit of this kind in `make test`.
@in_soak
@pytest.mark.slow
def test_a_short_fit_and_the_evaluation_of_its_version(tmp_path: Path) -> None:
    with server_of(DEMO, tmp_path) as server:
        found = short_fit(DEMO, server.base_url, tmp_path / "out")
        assert set(found["measures"]) == {*QUESTIONS, "all_right"}
        asked = ["detective@1", "--n", "8", "--base-url", server.base_url]
        assert re.search(r"detective@1: [01]\.\d+ ± 0\.\d+ \(n=8\)", evaluation(DEMO, *asked))


def detective(body: dict[str, Any]) -> dict[str, Any]:
    """A hosted model that thinks first, and answers with the row that the last clue is about."""
    *records, thief = body["messages"][-1]["content"].splitlines()
    value = thief.rstrip(".").split()[-1]
    (row,) = [line for line in records if value in line.rstrip(".").split()]
    said = re.fullmatch(r"(\w+) was in the (\w+) at (\w+) with the (\w+)\.", row)
    assert said is not None
    lines = [f"{name}: {one}" for name, one in zip(QUESTIONS, said.groups(), strict=True)]
    return {"content": "\n".join([f"It is about {value}.", *lines])}


async def test_the_program_runs_on_a_hosted_model() -> None:
    with HostedModel(detective) as hosted:
        rollout = make_rollout(hosted.chat)
        runs = [await rollout(puzzle) for puzzle in puzzles("test", 3, 0)]
    assert [run.reward for run in runs] == [1.0, 1.0, 1.0]
    assert all(run.scores["all_right"] == 1.0 for run in runs)
