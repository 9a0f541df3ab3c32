"""kill -9 of the client in its fit, while the server comes and goes: each step is taken once."""

import multiprocessing
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json

from langchain_art.training.fit_state import read_records
from langchain_art.training.records import StepRecord
from tests.support import fit_child
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.stub_engines import StubServer

KILLS, ROLLOUTS = count(4, 100), count(96, 1000)
STEPS = -(-ROLLOUTS // (fit_child.GROUPS * fit_child.SIZE))
#: Seconds for which the server is away, once.
AWAY = count(2, 60)


@pytest.mark.soak("F9", KILLS, f"kills of a client, {ROLLOUTS:,} rollouts; server away {AWAY} s")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 3600))
def test_a_client_that_is_killed_sends_each_rollout_once(tmp_path: Path) -> None:
    draw, out = random.Random(drawn_seed()), tmp_path / "fit"
    with StubServer(
        tmp_path / "data", seconds=(0.01, 0.1), settings="keep_checkpoints = 1000\n"
    ) as server:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.fit_child", "langchain_art_server"])

        def leave() -> None:
            server.kill()
            time.sleep(AWAY)
            server.start()

        kills, away = 0, threading.Thread(target=leave)
        while True:
            client = context.Process(target=fit_child.fit, args=(server.base_url, out, STEPS))
            client.start()
            if kills == KILLS:
                client.join(240)
                assert client.exitcode == 0
                break
            # Each once the fit is a part further: a fast machine has as many as a slow one.
            seconds = wait_for_steps(client, out, kills * (STEPS - 1) // KILLS)
            client.join(draw.uniform(0.0, seconds))
            client.join()
            kills += 1
            if kills == KILLS // 2:
                away.start()
        away.join()
        check(server, out)
    assert kills
    print(f"{kills} kills in {STEPS} steps")  # noqa: T201


def wait_for_steps(client: Any, out: Path, steps: int) -> float:
    """Until the fit has so many steps. Returns the seconds that its last step took, at most 2."""
    history, deadline = out / "history.jsonl", time.monotonic() + 240
    while client.is_alive() and time.monotonic() < deadline:
        lines = read_records(history) if history.exists() else ()
        done = [line for line in lines if isinstance(line, StepRecord)]
        if len(done) >= steps:
            return min(2.0, done[-1].seconds["total"]) if done else 1.0
        time.sleep(0.01)
    raise AssertionError(f"the fit has no {steps} steps; exit code {client.exitcode}")


def check(server: StubServer, out: Path) -> None:
    history = [from_json(line) for line in (out / "history.jsonl").read_bytes().splitlines()]
    steps = [line for line in history if line["kind"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    with server.http() as http:

        def get(path: str, **params: Any) -> Any:
            return http.get(path, params=params).raise_for_status().json()

        jobs = get("/v1/jobs", limit=1000)["data"]
        assert len({job["key"] for job in jobs}) == len(jobs) == STEPS
        assert [job["result"]["version"] for job in jobs] == list(range(1, STEPS + 1))
        trained: list[str] = []
        for version in range(1, STEPS + 1):
            folder = server.data_dir / "adapters" / "tiny" / str(version)
            trained += from_json((folder / "manifest.json").read_bytes())["trained"]
        assert len(set(trained)) == len(trained) > ROLLOUTS / 2
        for run in trained:
            turns = get(f"/v1/trajectories/{run}/audit")["turns"]
            assert len(turns) == 2, "half of a rollout was trained"
            assert {turn["excluded_because"] for turn in turns} == {None}, turns
