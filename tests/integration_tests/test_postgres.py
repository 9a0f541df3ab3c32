"""The whole server on PostgreSQL: it is killed and goes on, the database crashes and is back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from langchain_art.client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.wire import TrainConfig, Trajectory, TrajectoryGroup, Turn
from langchain_art_server.database import Database
from tests.live_server import LiveServer
from tests.postgres import Postgres

#: One group of runs with distinct rewards is enough of a step.
RUNS = 3


def group_of(server: LiveServer, number: int) -> TrajectoryGroup:
    """A group of sampled runs, each of one call."""
    runs: list[Trajectory] = []
    with server.http() as http:
        for run in range(RUNS):
            body: dict[str, Any] = {"model": server.policy, "max_tokens": 8, "seed": run}
            body["messages"] = [{"role": "user", "content": f"When is the review {number}?"}]
            reply = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            turn = Turn(node="n", call_id=reply["id"])
            runs.append(Trajectory(id=f"run-{number}-{run}", turns=(turn,), reward=float(run)))
    return TrajectoryGroup(id=f"group-{number}", trajectories=tuple(runs))


def train(server: LiveServer, number: int) -> int:
    """One step; the version that it made."""
    config = TrainConfig(learning_rate=1e-3)
    with ArtClient(server.base_url) as client:
        group = group_of(server, number)
        result = client.wait(client.train([group], server.policy, key=f"k-{number}", config=config))
        assert result.metrics["tokens_trained"] > 0
        return client.policy(server.policy).version


def nobody_else_may_have(url: str) -> None:
    with pytest.raises(ConfigError, match="Another server uses the database"):
        Database(url)


def test_a_server_and_its_database_may_each_die(tmp_path: Path, postgres: Postgres) -> None:
    url = postgres.database()
    server = LiveServer(tmp_path / "data", "--database-url", url)
    server.start()
    assert train(server, 0) == 1

    nobody_else_may_have(url)

    server.kill()
    server.start()
    with ArtClient(server.base_url) as client:
        assert client.policy(server.policy).version == 1
        status = client.status()
        assert (status.calls, status.trajectories, status.jobs) == (RUNS, RUNS, {"succeeded": 1})
    assert train(server, 1) == 2

    ask = {"model": server.policy, "max_tokens": 4, "messages": [{"role": "user", "content": "?"}]}
    postgres.crash()
    with server.http() as http:
        for method, path, body in (
            ("POST", "/v1/chat/completions", ask),
            ("GET", "/v1/jobs", None),
        ):
            refused = http.request(method, path, json=body)
            assert refused.status_code == 503, refused.text
            assert int(refused.headers["retry-after"]) > 0
            assert "The store could not" in refused.json()["error"]["message"]
        postgres.start()
        kept = http.post("/v1/chat/completions", json=ask).raise_for_status().json()["id"]
        assert http.get(f"/v1/calls/{kept}").raise_for_status().json()["id"] == kept
    assert train(server, 2) == 3
    nobody_else_may_have(url)
    server.stop()
    Database(url).close()  # whoever comes next may have it
