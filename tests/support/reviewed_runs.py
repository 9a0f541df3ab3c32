"""Fixtures: a Langfuse server that the environment leads to, and runs that the real server has."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from langchain_art.cli.main import app
from langchain_art.client.sync_client import ArtClient
from langchain_art.wire import Review, Trajectory
from tests.support.live_server import LiveServer

if TYPE_CHECKING:
    from tests.support.langfuse_server import LangfuseServer

Command = Callable[..., str]
MakeRuns = Callable[[int], list[Trajectory]]


@pytest.fixture
def langfuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[LangfuseServer]:
    # Not where the oldest dependencies are tested, without Langfuse's SDK.
    from tests.support.langfuse_server import LangfuseServer

    with LangfuseServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def own_policy(art_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A policy of the test's own, of which `make_runs` are."""
    name = f"own-{uuid.uuid4().hex[:8]}"
    monkeypatch.setattr(art_server, "policy", name)
    with ArtClient(art_server.base_url) as client:
        client.create_policy(name)
    return name


@pytest.fixture
def make_runs(art_server: LiveServer) -> Iterator[MakeRuns]:
    """Runs of one sampled call each, of a scenario of their own; deleted at the end."""
    made: list[str] = []

    def make(count: int) -> list[Trajectory]:
        found: list[Trajectory] = []
        scenario = f"s-{uuid.uuid4().hex}"
        with art_server.http() as http:
            for seed in range(count):
                run = f"review-{uuid.uuid4().hex}"
                asked = {
                    "model": art_server.policy,
                    "messages": [{"role": "user", "content": f"Question {seed}"}],
                    "max_tokens": 3,
                    "seed": seed,
                    "art": {"trajectory_id": run, "node": "writer", "scenario": scenario},
                }
                http.post("/v1/chat/completions", json=asked).raise_for_status()
                scores = {"scores": {"ruler": seed / 10}, "scenario": scenario}
                answer = http.put(f"/v1/trajectories/{run}/reward", json=scores)
                found.append(Trajectory.model_validate_json(answer.raise_for_status().content))
                made.append(run)
        return found

    yield make
    with art_server.http() as http:
        for run in made:
            http.delete(f"/v1/trajectories/{run}").raise_for_status()


@pytest.fixture
def review(art_server: LiveServer, capsys: pytest.CaptureFixture[str]) -> Command:
    """``langchain-art review`` on the shared server: takes its words, gives what it prints.

    It may end with 1, where there is nothing to do.
    """

    def said(*words: str) -> str:
        ended = app(["review", *words, "--base-url", art_server.base_url], standalone_mode=False)
        assert ended in (None, 0, 1)
        return capsys.readouterr().out

    return said


def human_reward(run: Trajectory, value: float | None, at: float = 1.0, **more: Any) -> Review:
    """The review of a person on the page that gives a run its reward."""
    about: dict[str, Any] = {"source": "page", "kind": "reward", "name": "human_reward"}
    about |= {"id": f"r-{run.id}", "trajectory": run.id, "value": value, "at": at} | more
    return Review(**about)
