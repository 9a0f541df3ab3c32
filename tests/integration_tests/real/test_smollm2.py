"""A pretrained model, from a GGUF file of a Python package, with all defaults: it is served and it
learns; sampler and learner agree; tools are shown to it that its own template does not show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from langchain_art import ArtClient
from langchain_art.wire import TrainResult
from tests.support.live_server import LiveServer
from tests.support.real_models import smollm2
from tests.support.tiny_models import CLOCK, WEATHER

pytestmark = pytest.mark.slow
STEPS, RUNS = 3, 4
CAPITAL = {"role": "user", "content": "What is the capital of France?"}
ASKED = {"role": "user", "content": "Will it rain in Paris in the next 2 days?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    smollm2()  # or the test is skipped
    data = tmp_path_factory.mktemp("smollm2") / "data"
    options = ("--chat-template", "tools", "--device", "cpu")
    started = LiveServer(data, *options, model="smollm2-135m").start(600)
    yield started
    started.stop()


def chat(http: httpx.Client, server: LiveServer, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json={"model": server.policy, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def test_it_knows_what_it_was_trained_for(server: LiveServer) -> None:
    with server.http() as http:
        said = chat(http, server, messages=[CAPITAL], temperature=0, max_tokens=16)
    assert said["content"] == "The capital of France is Paris."


def step(http: httpx.Client, server: LiveServer, number: int) -> TrainResult:
    """Answers in words and calls of a tool, one turn each, rewarded by their length."""
    forced = {"type": "function", "function": {"name": "weather"}}
    tools = {"messages": [ASKED], "tools": [WEATHER, CLOCK], "tool_choice": forced}
    groups: list[list[str]] = []
    said_in_words = {"messages": [CAPITAL], "max_tokens": 16}
    for kind, asked in ("said", said_in_words), ("called", tools | {"max_tokens": 64}):
        groups.append([f"{kind}-{number}-{seed}" for seed in range(RUNS)])
        for seed, run in enumerate(groups[-1]):
            more = {"seed": seed, "art": {"trajectory_id": run}}
            said = chat(http, server, **asked, **more)
            if kind == "called":
                [call] = said["tool_calls"]
                arguments = json.loads(call["function"]["arguments"])
                assert call["function"]["name"] == "weather" and {"city", "days"} == set(arguments)
            reward = len(json.dumps(said)) + seed
            http.put(f"/v1/trajectories/{run}/reward", json={"reward": reward})
    with ArtClient(server.base_url) as client:
        job = client.train(groups, server.policy)
        return client.wait(job.id)


def test_three_steps_are_trained_on_what_was_sampled(server: LiveServer) -> None:
    with server.http() as http:
        results = [step(http, server, number) for number in range(STEPS)]
    assert [result.version for result in results] == [1, 2, 3]
    for result in results:
        assert 0 < result.metrics["logprob_gap_mean"] <= 1e-5, result.metrics
        assert result.metrics["probe_change"] > 0 and not result.excluded, result
    log = server.log.read_text()
    assert "deprecated" not in log and "Failed to load" not in log, log
