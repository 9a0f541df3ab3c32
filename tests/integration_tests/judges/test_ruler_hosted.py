"""Judges behind HTTP: langchain-openai's model, and a name through litellm."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator

import pytest
from langchain_openai import ChatOpenAI

from langchain_art import RulerEvaluator
from tests.support.environments import litellm_python
from tests.support.judges.groups import group, run, says
from tests.support.judges.judge_server import JudgeServer
from tests.support.live_server import REPO

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
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["rewards"] == [0.1, 0.9]
    assert (told["structured"], told["tokens"]) == (True, [2000, 200])
    assert 0.001 < told["cost"] < 0.1  # litellm's price of o3, for 2,200 tokens
    assert told["unpriced"] == [0, 2]
    assert "model_kwargs" in told["refused"]
    assert {body["model"] for body in server.seen} == {"o3", "no-such-model"}
    assert server.seen[0]["temperature"] == 1.0
