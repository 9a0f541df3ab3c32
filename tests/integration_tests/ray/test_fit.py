"""A fit through workers and replicas on three nodes, one of which is killed in the middle."""

import threading
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import ray
from pydantic_core import from_json
from rich.console import Console

from examples.email_search.inbox import build
from langchain_art import ArtClient, FitResult, StepRecord, TrainConfig, Trainer
from langchain_art.ray import RayWorkers
from langchain_art.statistics.intervals import mean_of_scenarios
from tests.support.live_server import LiveServer
from tests.support.mail_rollout import scenarios
from tests.support.ray_cluster import LocalCluster, local_cluster
from tests.support.soak import count, in_soak
from tests.support.storms import Witness

pytestmark = pytest.mark.slow
ROLLOUT = "tests.support.mail_rollout:rollout"
#: Of a step.
GROUPS, SIZE = 4, 4
CONFIG = """
keep_checkpoints = 100   # their manifests say what was trained

[sampler]
replicas = 2

[ray]
replica = {CPU = 0.5}
learner = {CPU = 0.5}
"""
SEEDS = count(1, 3)
#: Of a fit; a node is killed while the rollouts of one in the middle run.
STEPS = count(4, 24)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(nodes=3, cpus=2) as made:
        yield made
        ray.shutdown()


def fit(folder: Path, cluster: LocalCluster, seed: int, kill_after: int | None) -> FitResult:
    """A fit through two workers and two replicas; what was trained is on disk, and once."""
    folder.mkdir()
    mails = build(folder / "mails.sqlite3", n_train=256, n_test=32, seed=seed)
    server = LiveServer(folder / "data", "--ray", cluster.address, settings=CONFIG).start()
    witness, lost = Witness(server), list[tuple[int, ...]]()
    witness.start()

    def kill() -> None:
        """Kill the node that has most of the fit's actors while rollouts run."""
        with server.http() as http:
            while not http.get("/status").json()["rollouts"].get("leased"):
                time.sleep(0.02)
        workers, replicas = map(cluster.hosts, ("RolloutActor", "EngineHost"))
        most = max(range(len(workers)), key=lambda node: (workers[node], replicas[node]))
        cluster.kill(most)
        lost.append((workers[most], sum(map(bool, workers))))

    def on_step(record: StepRecord) -> None:
        if record.step == kill_after:
            threading.Thread(target=kill, daemon=True).start()

    try:
        trainer = Trainer(
            "tiny",
            client=ArtClient(server.base_url),
            group_size=SIZE,
            groups_per_step=GROUPS,
            config=TrainConfig(learning_rate=3e-3),
            seed=seed,
            out_dir=folder / "fit",
            concurrency=8,
            workers=RayWorkers(2, address=cluster.address),
            console=Console(file=StringIO()),
        )
        train = scenarios(mails, "train")
        result = trainer.fit_sync(ROLLOUT, train, steps=STEPS, on_step=on_step)
        assert lost == ([] if kill_after is None else [(1, 2)])
        witness.stop.set()
        witness.join()
        check(server, result, witness.acknowledged)
        return result
    finally:
        witness.stop.set()
        server.stop()


def check(server: LiveServer, result: FitResult, acknowledged: list[str]) -> None:
    assert [one.step for one in result.history] == list(range(1, STEPS + 1))
    assert all(one.groups == GROUPS + one.resampled for one in result.history)
    with server.http() as http:
        jobs = http.get("/v1/jobs", params={"limit": 1000}).json()["data"]
        assert {job["state"] for job in jobs} == {"succeeded"}
        assert len({job["key"] for job in jobs}) == len(jobs) == STEPS
        trained: list[str] = []
        for version in sorted((server.data_dir / "adapters" / "tiny").iterdir()):
            trained += from_json((version / "manifest.json").read_bytes()).get("trained", [])
        assert trained and len(set(trained)) == len(trained)
        for one in acknowledged:
            assert http.get(f"/v1/trajectories/{one}").status_code == 200, one
        for one in trained:
            audit = http.get(f"/v1/trajectories/{one}/audit").raise_for_status().json()
            assert "lost" not in {turn["excluded_because"] for turn in audit["turns"]}


def last_rewards(result: FitResult) -> list[float]:
    """Mean rewards of the last quarter of the steps."""
    last = result.history[-max(1, STEPS // 4) :]
    return [one.reward_mean for one in last if one.reward_mean is not None]


@in_soak
@pytest.mark.soak("K6", SEEDS, "fits through a cluster that loses a node")
@pytest.mark.timeout(count(600, 14_400))
def test_a_fit_goes_on_when_a_node_is_killed(tmp_path: Path, cluster: LocalCluster) -> None:
    killed: list[float] = []
    whole: list[float] = []
    for seed in range(SEEDS):
        killed += last_rewards(fit(tmp_path / f"killed-{seed}", cluster, seed, STEPS // 2))
        if SEEDS > 1:
            cluster.add(2)
            whole += last_rewards(fit(tmp_path / f"whole-{seed}", cluster, seed, None))
    if SEEDS > 1:
        one, other = (mean_of_scenarios([[r] for r in rewards]) for rewards in (killed, whole))
        assert one.ci95 is not None and other.ci95 is not None
        figures = f"rewards {one.mean:.3f} ± {one.ci95:.3f} with the loss of a node, "
        figures += f"{other.mean:.3f} ± {other.ci95:.3f} without"
        print(figures)  # noqa: T201
        assert abs(one.mean - other.mean) <= one.ci95 + other.ci95
