"""Judges behind HTTP: langchain-openai's model, and a name through litellm."""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from langchain_openai import ChatOpenAI

from langchain_art import RulerEvaluator
from tests.support.environments import litellm_python
from tests.support.json_server import JsonServer, Refusal, completion
from tests.support.judges.groups import group, run, says
from tests.support.judges.literal_judge import literal
from tests.support.live_server import REPO

RUNS = group(run("a", says("BAD")), run("b", says("GOOD")))


class JudgeServer(JsonServer):
    """OpenAI's API on loopback, where the literal judge answers.

    Keeps the bodies that it was sent in `seen`; refuses as `refusals` say before it answers.
    """

    def __init__(self, refusals: Sequence[Refusal] = ()) -> None:
        super().__init__()
        self._refusals = list(refusals)
        self.times: list[float] = []

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def seen(self) -> list[dict[str, Any]]:
        return [body for _, body in self.requests]

    def answer(self, path: str, body: Any) -> Any:
        self.times.append(time.monotonic())
        if self._refusals:
            raise self._refusals.pop(0)
        message = {"role": "assistant", "content": literal(body["messages"][1]["content"])}
        return completion(body["model"], message, 1000, 100)


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
