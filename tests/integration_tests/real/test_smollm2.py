"""Pretrained models, from GGUF files of Python packages, with all defaults: they are served and
learn; sampler and learner agree; tools are shown that the model's own template does not show."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.documentation.train import DEMO as DOCUMENTATION
from examples.frozen_lake.environment import MAX_MOVES
from examples.frozen_lake.train import DEMO as FROZEN_LAKE
from examples.function_calling.train import DEMO as FUNCTION_CALLING
from langchain_art import ArtClient
from langchain_art.diagnostics.canary import run_canary
from langchain_art.wire import TrainResult
from tests.support.examples import evaluation, short_fit
from tests.support.live_server import ForkedServer, LiveServer
from tests.support.real_models import gemma3, leaderboard, smollm2
from tests.support.soak import count, in_soak
from tests.support.tiny_models import CLOCK, WEATHER

pytestmark = pytest.mark.slow
STEPS, RUNS = count(1, 3), count(2, 4)
#: Nats a token, the mean: measured 0.6e-5 in float32 on 120 tokens. From float64, the learner is
#: 0.35e-5 away, the sampler 0.56e-5; it was 0.9e-5 with the sum of torch's float32 softmax.
GAP = 1e-5
CAPITAL = {"role": "user", "content": "What is the capital of France?"}
ASKED = {"role": "user", "content": "Will it rain in Paris in the next 2 days?"}


def served(folder: Path, prepare: Callable[[Path], tuple[str, str]]) -> Iterator[LiveServer]:
    model, template = prepare(folder)  # or the test is skipped
    options = ("--chat-template", template, "--device", "cpu")
    started = ForkedServer(folder / "data", *options, model=model).start(900)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    yield from served(tmp_path_factory.mktemp("smollm2"), smollm2)


def chat(http: httpx.Client, server: LiveServer, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json={"model": server.policy, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def step(http: httpx.Client, server: LiveServer, number: int, *kinds: str) -> TrainResult:
    """Answers in words and calls of a tool, one turn each, rewarded by their length."""
    forced = {"type": "function", "function": {"name": "weather"}}
    asked: dict[str, dict[str, Any]] = {
        "said": {"messages": [CAPITAL], "max_tokens": 16},
        "called": {"messages": [ASKED], "tools": [WEATHER, CLOCK], "max_tokens": 64},
    }
    asked["called"]["tool_choice"] = forced
    groups: list[list[str]] = []
    for kind in kinds:
        groups.append([f"{kind}-{number}-{seed}" for seed in range(RUNS)])
        with ThreadPoolExecutor(RUNS) as threads:
            calls = [
                threads.submit(
                    chat, http, server, **asked[kind], seed=seed, art={"trajectory_id": run}
                )
                for seed, run in enumerate(groups[-1])
            ]
            replies = [call.result() for call in calls]
        for seed, (run, said) in enumerate(zip(groups[-1], replies, strict=True)):
            if kind == "called":
                [call] = said["tool_calls"]
                arguments = json.loads(call["function"]["arguments"])
                assert call["function"]["name"] == "weather" and {"city", "days"} == set(arguments)
            reward = 2 * len(json.dumps(said)) + seed  # seeds 0 and 1 never have the same
            http.put(f"/v1/trajectories/{run}/reward", json={"reward": reward})
    with ArtClient(server.base_url) as client:
        return client.wait(client.train(groups, server.policy))


def learns(server: LiveServer, *first: str) -> None:
    """The first step is of these kinds, the others of answers in words."""
    with server.http() as http:
        kinds = (first, *[("said",)] * (STEPS - 1))
        results = [step(http, server, number, *kinds[number]) for number in range(STEPS)]
    assert [result.version for result in results] == list(range(1, STEPS + 1)), results
    for result in results:
        assert 0 < result.metrics["logprob_gap_mean"] <= GAP, result.metrics
        assert result.metrics["probe_change"] > 0 and not result.excluded, result


def test_it_knows_what_it_was_trained_for(server: LiveServer) -> None:
    with server.http() as http:
        said = chat(http, server, messages=[CAPITAL], temperature=0, max_tokens=16)
    assert said["content"] == "The capital of France is Paris."


@pytest.mark.soak
def test_steps_are_trained_on_what_was_sampled(server: LiveServer) -> None:
    learns(server, "said", "called")
    log = server.log.read_text()
    assert "deprecated" not in log and "Failed to load" not in log, log


# The pretrained model's step above, and the short fits of `tests/integration_tests/examples` on
# small models, show the kind of this one and of the next two.
@in_soak
def test_a_step_on_an_environment_of_others(server: LiveServer, tmp_path: Path) -> None:
    small = {"groups_per_step": 2, "group_size": 4, "held_out": 2}
    found = short_fit(FROZEN_LAKE, server.base_url, tmp_path, steps=1, **small)
    [policy] = FROZEN_LAKE.policies
    assert found["adapter"].startswith(f"{policy}@") and "reached" in found["measures"]
    with ArtClient(server.base_url) as client:
        runs = [run for part in ("train", "test") for run in client.trajectories(50, f"{part}-0-0")]
    assert {1} != {len(run.turns) for run in runs} <= set(range(1, MAX_MOVES + 1))
    for run in runs:
        assert 0 <= run.reward <= 1 and run.scores["reached"] == (run.reward == 1)


@in_soak
@pytest.mark.timeout(900)
def test_a_step_on_calls_of_a_public_benchmark(server: LiveServer, tmp_path: Path) -> None:
    leaderboard()
    sizes = {"groups_per_step": 2, "group_size": 4, "held_out": 2}
    found = short_fit(
        replace(FUNCTION_CALLING, max_tokens=48), server.base_url, tmp_path, steps=1, **sizes
    )
    assert set(found["measures"]) == {"correct"}
    assert "**caller**:" in (tmp_path / "transcripts.md").read_text()
    asked = ["caller", "--base-url", server.base_url, "--n", "1", "--few-shot", "1"]
    assert "correct: " in evaluation(FUNCTION_CALLING, *asked)


@in_soak
def test_the_documentation_agent_makes_a_step(server: LiveServer, tmp_path: Path) -> None:
    """One question in four runs, and two held-out ones before and after."""
    small = replace(DOCUMENTATION, policies=(server.policy,))
    sizes = {"groups_per_step": 1, "group_size": 4, "held_out": 2}
    found = short_fit(small, server.base_url, tmp_path, 1, **sizes)
    # Where a wrong page was opened there may be one value to choose.
    assert found["excluded"].keys() <= {"groups.zero_variance", "calls.no_choice"}, found
    for when in ("before", "after"):
        shares = [found["measures"][name][when]["mean"] for name in ("found", "opened", "answered")]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) / 3 == pytest.approx(found[when]["mean"])


@in_soak
@pytest.mark.timeout(7200)
def test_smollm2_passes_the_canary(server: LiveServer) -> None:
    report = run_canary(server.base_url)
    assert report.passed, report


@in_soak
@pytest.mark.timeout(7200)
def test_gemma_learns_and_passes_the_canary(tmp_path: Path) -> None:
    for server in served(tmp_path, gemma3):
        learns(server, "said")
        report = run_canary(server.base_url)
        assert report.passed, report
