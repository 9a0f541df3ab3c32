"""Several servers of one database and one data directory, their clients, calls and jobs."""

import os
import signal
import time
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa

from langchain_art_server.storage.schema import connect
from tests.support import steps_of_a_fit
from tests.support.live_server import ForkedServer
from tests.support.postgres import Postgres
from tests.support.storms import Patient

QUESTION = [{"role": "user", "content": "When is the audit?"}]
#: Seconds within which each server routes to what was published.
SOON = 1.0


class Gateway(ForkedServer):
    """One server of a fleet."""

    def __init__(
        self, folder: Path, number: int, data_dir: Path, *args: str, env: dict[str, str]
    ) -> None:
        super().__init__(data_dir, *args, env=env, module="tests.support.fleet_server")
        self.log = folder / f"gateway-{number}.log"

    @property
    def is_stopped(self) -> bool:
        """Whether the process has stopped itself, or was stopped."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def thaw(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)


class Gateways:
    """A fleet of two servers; one that is killed is the test's to start again."""

    def __init__(
        self, folder: Path, postgres: Postgres, settings: str = "", api_key: str | None = None
    ) -> None:
        self.folder, self.url = folder, postgres.database()
        self.stop_file = folder / "stop"
        env = {"STOP_FILE": str(self.stop_file)} | ({"ART_API_KEY": api_key} if api_key else {})
        (folder / "fleet.toml").write_text(f"fleet = true\n{settings}")
        args = ("--config", str(folder / "fleet.toml"), "--database-url", self.url)
        self.all = [Gateway(folder, number, folder / "data", *args, env=env) for number in range(2)]

    def __enter__(self) -> Self:
        for one in self.all:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.all:
            if one.process is not None and one.process.poll() is None:
                one.thaw()
                one.stop()

    def rows(self, query: str, **values: Any) -> list[Any]:
        """What the database says."""
        engine = connect(self.url)
        with engine.connect() as connection:
            found = list(connection.execute(sa.text(query), values))
        engine.dispose()
        return found


class AnyGateway(Patient):
    """Sends each request to one server, and to the next until one answers."""

    def __init__(self, fleet: Gateways, first: int = 0) -> None:
        super().__init__(fleet.all[0])
        self.roots, self.at = [one.root for one in fleet.all], first


# --- calls and jobs ------------------------------------------------------------------------------


def said(gateway: Gateway, policy: str, **more: Any) -> Any:
    """A call, and what answered it."""
    body = {"model": policy, "messages": QUESTION, "max_tokens": 4} | more
    with gateway.http() as http:
        return http.post("/v1/chat/completions", json=body)


def routes_to(gateway: Gateway, policy: str, model: str) -> None:
    """Wait until a server routes a policy's name to `model`: calls that are sent `SOON` from now.

    However long such a call takes: it waits until the server knows what to answer with.
    """
    soon, until, found = time.monotonic() + SOON, time.monotonic() + 60, None
    while found != model:
        sent = time.monotonic()
        assert sent < until, found
        found = said(gateway, policy).json().get("model")
        assert sent < soon or found in (None, model), f"{found} is stale"


def make_runs(gateways: list[Gateway], policy: str, name: str) -> list[str]:
    """Four runs with rewards, whose calls go to the servers in turn."""
    runs = [f"{policy}-{name}-{seed}" for seed in range(4)]
    for seed, run in enumerate(runs):
        gateway = gateways[seed % len(gateways)]
        answer = said(gateway, policy, seed=seed, max_tokens=8, art={"trajectory_id": run})
        assert answer.status_code == 200, answer.text
        with gateways[(seed + 1) % len(gateways)].http() as http:
            reward = {"reward": float(seed % 2)}
            http.put(f"/v1/trajectories/{run}/reward", json=reward).raise_for_status()
    return runs


def order(gateway: Gateway, policy: str, runs: list[str], key: str) -> Any:
    body = {"policy": policy, "groups": [runs], "config": {"learning_rate": 1e-3}}
    with gateway.http() as http:
        answer = http.post("/v1/train", json=body, headers={"Idempotency-Key": key})
        return answer.raise_for_status().json()


def ended(gateway: Gateway, job: Any) -> Any:
    with gateway.http() as http:
        return steps_of_a_fit.ended(http, job)


def make_policy(fleet: Gateways, name: str) -> str:
    with fleet.all[0].http() as http:
        http.post("/v1/policies", json={"name": name}).raise_for_status()
    return name


def stopped(fleet: Gateways) -> tuple[Gateway, Gateway]:
    """The server that has stopped itself, and the other one."""
    until = time.monotonic() + 60
    while True:
        for one, other in (fleet.all, fleet.all[::-1]):
            if one.is_stopped and not fleet.stop_file.exists():
                return one, other
        assert time.monotonic() < until, "no server came to it"
        time.sleep(0.01)
