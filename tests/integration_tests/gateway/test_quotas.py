"""Quotas: what is full says which setting decides, and takes more when there is less."""

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from langchain_art import ArtClient, Trajectory
from langchain_art.errors import Overloaded, QuotaExceeded
from tests.integration_tests.gateway.test_readiness import ASK
from tests.support.engines import engines, part_of
from tests.support.live_server import HastyServer, LiveServer

SETTINGS = "max_policies = 2\nmax_queued_jobs = 1\nmax_stored_bytes = 3000000\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with HastyServer(tmp_path_factory.mktemp("quotas") / "data", settings=SETTINGS) as made:
        yield made


def test_policies_are_limited_until_one_is_deleted(server: LiveServer) -> None:
    with ArtClient(server.base_url) as client:
        client.create_policy("second")
        client.create_policy("second")
        with pytest.raises(QuotaExceeded, match="max_policies is 2"):
            client.create_policy("third")
        client.delete_policy("second")
        client.create_policy("third")
        client.delete_policy("third")


@pytest.mark.soak
def test_stored_bytes_are_limited_until_runs_are_deleted(server: LiveServer) -> None:
    ids: list[str] = []
    deadline = time.monotonic() + 120
    with ArtClient(server.base_url) as client, server.http() as http:
        # The server looks every few seconds: as many fit as are sent until then.
        with pytest.raises(QuotaExceeded, match="max_stored_bytes"):
            while time.monotonic() < deadline:  # with what cannot be compressed
                output = random.randbytes(400_000).hex()
                client.post_trajectory(Trajectory(id=f"big-{len(ids)}", output=output))
                ids.append(f"big-{len(ids)}")
                time.sleep(0.2)
        assert [run.id for run in client.trajectories(5)] == ids[:-6:-1]  # by pages of bytes
        answer = http.post("/v1/chat/completions", json=ASK)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "insufficient_quota"
        assert "max_stored_bytes is 3000000" in answer.json()["error"]["message"]
        assert client.status().ready
        for refused in (
            lambda: client.create_policy("more"),
            lambda: client.train([ids[:2]], "tiny"),
        ):
            with pytest.raises(QuotaExceeded, match="max_stored_bytes"):
                refused()
        for name in ids:
            client.delete_trajectory(name)
        while http.post("/v1/chat/completions", json=ASK).status_code == 429:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert client.status().stored_bytes < 3_000_000


@pytest.mark.soak
@pytest.mark.slow
def test_jobs_are_limited_and_a_stopped_learner_blocks_none(server: LiveServer) -> None:
    with ArtClient(server.base_url, patience=0.0) as client, server.http() as http:
        for name in ("a", "b"):
            http.post("/v1/chat/completions", json=ASK | {"art": {"trajectory_id": name}})
            client.reward(name, float(name == "a"))
        [learner] = [pid for pid in engines(server) if part_of(pid) == "learner"]
        os.kill(learner, signal.SIGSTOP)
        job = client.train([["a", "b"]], "tiny", key="key")
        with pytest.raises(Overloaded, match="max_queued_jobs") as refused:
            client.train([["b", "a"]], "tiny")
        assert refused.value.retry_after
        assert client.train([["a", "b"]], "tiny", key="key").id == job.id
        assert client.wait(job).version == 1  # by the learner that replaced it
        assert learner not in engines(server)
