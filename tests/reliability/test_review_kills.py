"""kill -9 of a pull, of `review train`, of the server: no verdict is trained twice, none is lost.

The engines compute nothing (`tests.support.stub_engines`).
"""

import multiprocessing
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json

from langchain_art.client.sync_client import ArtClient
from langchain_art.wire import Trajectory
from tests.support import review_child
from tests.support.exported_runs import export
from tests.support.langfuse_server import LangfuseServer
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.stub_engines import StubServer

KILLS = count(2, 100)
RUNS = 3


@pytest.mark.soak("R2", KILLS, "kills of pull, review train and the server")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 3600))
def test_verdicts_are_trained_once_whoever_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(drawn_seed())
    settings = "keep_checkpoints = 1000\n"
    server = StubServer(tmp_path / "data", settings=settings).start()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.review_child", "langfuse.api"])
    said: dict[str, float] = {}
    corrected: dict[str, str] = {}
    with LangfuseServer() as langfuse, ArtClient(server.base_url) as client:
        for name, value in langfuse.environment.items():
            monkeypatch.setenv(name, value)
        arguments = (server.base_url, "tiny", tmp_path / "notes", langfuse.environment)
        took, killed = 1.0, 0
        try:
            for number in range(KILLS + 1):
                runs = [
                    sampled(client, server, f"r{number}-{i}", f"s{number}") for i in range(RUNS)
                ]
                where = export(langfuse, runs)
                for value, run in enumerate(runs):
                    trace, [call] = where[run.id]
                    langfuse.annotate(trace, "human_reward", value / (RUNS - 1))
                    said[run.id] = value / (RUNS - 1)
                    if not value:
                        about: Any = {"observation_id": call, "data_type": "CORRECTION"}
                        langfuse.annotate(trace, "output", f"better {run.id}", **about)
                        corrected[run.id] = f"better {run.id}"
                child = context.Process(target=review_child.pull_and_train, args=arguments)
                child.start()
                if number == KILLS:
                    break
                child.join(draw.uniform(0.2, took))
                if draw.random() < 0.3:
                    server.kill()
                    child.kill()
                    server.start()
                killed += child.is_alive()
                child.kill()
                child.join()
            child.join(120)
            assert child.exitcode == 0
            check(server, client, said, corrected)
        finally:
            server.stop()
    print(f"{killed} of {KILLS} while it worked; {len(said) + len(corrected)} verdicts")  # noqa: T201


def sampled(client: ArtClient, server: StubServer, run: str, scenario: str) -> Trajectory:
    with server.http() as http:
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": run}]}
        asked |= {"art": {"trajectory_id": run, "node": "n", "scenario": scenario}}
        http.post("/v1/chat/completions", json=asked).raise_for_status()
        answer = http.put(f"/v1/trajectories/{run}/reward", json={"scenario": scenario})
    return Trajectory.model_validate_json(answer.raise_for_status().content)


def check(
    server: StubServer, client: ArtClient, said: dict[str, float], corrected: dict[str, str]
) -> None:
    """By the manifests of the versions, which say what each learned from."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    better: defaultdict[str, int] = defaultdict(int)
    for folder in (server.data_dir / "adapters" / "tiny").iterdir():
        manifest = from_json((folder / "manifest.json").read_bytes())
        for run in manifest.get("trained", []):
            with server.http() as http:
                answer = http.get(f"/page/runs/{run}/credit/{manifest['job']}").raise_for_status()
            rewards[run].append(answer.json()["reward"])
        for name in manifest.get("imitated", []):
            if name.startswith("correction:"):
                [turn] = client.trajectory(name).turns
                better[str((turn.reply or {})["content"])] += 1
    assert rewards == {run: [value] for run, value in said.items()}
    assert better == dict.fromkeys(corrected.values(), 1)
    plan = client.plan_reviews("tiny")
    assert {one.fate for one in plan.verdicts} == {"trained"}
    assert {len(one.trained) for one in plan.verdicts} == {1}
    assert len(plan.verdicts) == len(said) + len(corrected)
