"""Judges behind HTTP: langchain-openai's model, and a name through litellm."""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator

import pytest
from langchain_openai import ChatOpenAI

from langchain_art import RulerEvaluator
from tests.support.environments import litellm_python
from tests.support.json_server import Refusal
from tests.support.judges.groups import group, run, says
from tests.support.judges.judge_server import JudgeServer, check_by_name
from tests.support.live_server import REPO
from tests.support.soak import in_soak

RUNS = group(run("a", says("BAD")), run("b", says("GOOD")))


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer() as running:
        yield running


def test_one_judge_serves_one_event_loop_after_another(server: JudgeServer) -> None:
    model = ChatOpenAI(model="m", base_url=server.base_url, api_key="none", max_retries=0)  # type: ignore[arg-type]
    evaluator = RulerEvaluator(model, attempts=1)
    for _ in range(3):
        judged = asyncio.run(evaluator.ainvoke(RUNS))
        assert [one.reward for one in judged.trajectories] == [0.1, 0.9]
    judged = evaluator.invoke(RUNS)
    assert [one.reward for one in judged.trajectories] == [0.1, 0.9]
    assert (evaluator.spent.input_tokens, evaluator.spent.unpriced) == (8000, 8)
    schema = server.seen[0]["response_format"]["json_schema"]["schema"]
    assert set(schema["properties"]) == {"scores"}


def test_a_judge_without_retries_of_its_own_waits_as_long_as_it_is_told() -> None:
    with JudgeServer([Refusal(429, Retry_After="1"), Refusal(503, retry_after_ms="500")]) as server:
        model = ChatOpenAI(model="m", base_url=server.base_url, api_key="none", max_retries=0)  # type: ignore[arg-type]
        evaluator = RulerEvaluator(model, passes=1)
        assert [one.reward for one in evaluator.invoke(RUNS).trajectories] == [0.1, 0.9]
        first, second, third = server.times
        assert second - first >= 1.0
        assert third - second >= 0.5
        assert (evaluator.spent.calls, evaluator.spent.unusable) == (3, 2)


@in_soak  # `test_harbor` asks by a name, where litellm is imported already
@pytest.mark.slow
@pytest.mark.timeout(600)  # the environment takes minutes to make
def test_a_name_is_asked_through_litellm(server: JudgeServer) -> None:
    script = REPO / "tests/support/judges/litellm_judge.py"
    done = subprocess.run(
        [litellm_python(), script, server.base_url],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(REPO), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    check_by_name(json.loads(done.stdout.splitlines()[-1]), server)
