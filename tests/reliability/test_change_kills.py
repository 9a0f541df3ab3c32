"""kill -9 while policies are created, rolled back, pinned and reviewed, and rollouts are queued.

What was acknowledged is there, and once; what was not is there whole, or not at all. The engines
compute nothing (`tests.support.stub_engines`).
"""

import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.hot_swap import train_once
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.stub_engines import StubServer

KILLS, VERSIONS, RUNS, ROLLOUTS = count(2, 200), 3, 4, 3
LEASE = {"worker": "w", "name": "w", "rollout": "r", "slots": 9, "free": 9, "seconds": 600.0}


class Changes:
    """Changes in a random order; of each thing, the values that it may have now."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.number = draw, 0
        self.may_be: dict[tuple[str, Any], set[Any]] = {("serving", "tiny"): {VERSIONS}}
        self.may_be |= {("pinned", version): {False} for version in range(VERSIONS)}
        self.may_be |= {("review", run): {None} for run in range(RUNS)}
        self.held: dict[str, str] = {}  # the rollouts that are leased, with their attempts
        self.done = Counter[str]()  # those that were taken and said to have arrived
        self.acknowledged = Counter[str]()

    def one(self, http: httpx.Client) -> None:
        """Make a change; a connection that ends leaves both values possible."""
        self.number += 1
        make = self.draw.choice([self.create, self.roll_back, self.pin, self.review, self.queue])
        make(http)
        self.acknowledged[make.__name__] += 1

    def set(self, kind: str, of: Any, value: Any, answer: Any) -> None:
        possible = self.may_be.setdefault((kind, of), {None})
        possible.add(value)
        response: httpx.Response = answer()
        assert response.status_code == 200, response.text
        self.may_be[kind, of] = {value}

    def create(self, http: httpx.Client) -> None:
        name = f"p{self.draw.randrange(24)}"
        self.set("policy", name, True, lambda: http.post("/v1/policies", json={"name": name}))

    def roll_back(self, http: httpx.Client) -> None:
        body = {"version": self.draw.randrange(VERSIONS + 1), "why": "so"}
        path = "/v1/policies/tiny/rollback"
        self.set("serving", "tiny", body["version"], lambda: http.post(path, json=body))

    def pin(self, http: httpx.Client) -> None:
        version, pinned = self.draw.randrange(VERSIONS), self.draw.random() < 0.5
        path = f"/v1/policies/tiny/checkpoints/{version}/pin"
        ask = http.put if pinned else http.delete
        self.set("pinned", version, pinned, lambda: ask(path))

    def review(self, http: httpx.Client) -> None:
        run, value = self.draw.randrange(RUNS), self.draw.choice([0.0, 0.5, 1.0])
        said = {"id": f"v{run}", "source": "api", "trajectory": f"swap-tiny-0-{run}"}
        said |= {"kind": "score", "name": "n", "value": value, "at": float(self.number)}
        body = {"reviews": [said]}
        self.set("review", run, value, lambda: http.put("/v1/reviews", json=body))

    def queue(self, http: httpx.Client) -> None:
        step = self.draw.choice(["put", "lease", "complete", "take"])
        if step == "put":
            ids = [f"b{self.number}-{n}" for n in range(ROLLOUTS)]
            body = {"batch": f"b{self.number}", "rollout": "r"}
            body |= {"rollouts": [{"id": one, "scenario": {}} for one in ids]}
            name = body["batch"]
            self.set("batch", name, True, lambda: http.post("/v1/rollouts", json=body))
        elif step == "lease":
            body = LEASE | {"holds": list(self.held.values())}
            for one in http.post("/v1/rollouts/lease", json=body).json()["leases"]:
                assert not self.done[one["id"]], f"{one['id']} was taken, and is leased again"
                self.held[one["id"]] = one["trajectory_id"]
        elif step == "complete" and self.held:
            rollout, run = self.draw.choice(sorted(self.held.items()))
            body = {"trajectory_id": run, "trajectory": {"id": run, "reward": 1.0}}
            answer = http.post(f"/v1/rollouts/{rollout}/complete", json=body)
            assert answer.status_code == 200, answer.text
            del self.held[rollout]
        elif step == "take":
            for (kind, name), may_be in sorted(self.may_be.items(), key=str):
                if kind == "batch" and may_be == {True} and self.draw.random() < 0.3:
                    self.take(http, name)

    def take(self, http: httpx.Client, batch: str) -> None:
        path, done = f"/v1/rollouts/batches/{batch}/take", list[str]()
        while finished := http.post(path, json={"done": done}).json()["finished"]:
            done = [one["id"] for one in finished]
            assert not sum(self.done[one] for one in done), "one that has arrived came again"
        self.done.update(done)

    def check(self, http: httpx.Client) -> None:
        """After a restart: each thing is as it may be, and is there once."""
        policies = http.get("/v1/policies").json()["data"]
        names = Counter(one["name"] for one in policies)
        assert set(names.values()) == {1}
        [tiny] = [one for one in policies if one["name"] == "tiny"]
        self.is_one_of("serving", "tiny", tiny["version"])
        versions = http.get("/v1/policies/tiny/checkpoints").json()["data"]
        reviews = http.get("/v1/reviews", params={"source": "api"}).json()["data"]
        assert len({one["id"] for one in reviews}) == len(reviews)
        values = {one["id"]: one["value"] for one in reviews}
        pinned = {one["version"]: one["pinned"] for one in versions}
        for kind, of in list(self.may_be):
            if kind == "policy":
                self.is_one_of(kind, of, True if of in names else None)
            elif kind == "pinned":
                self.is_one_of(kind, of, pinned[of])
            elif kind == "review":
                self.is_one_of(kind, of, values.get(f"v{of}"))
            elif kind == "batch":
                answer = http.get(f"/v1/rollouts/batches/{of}")
                self.is_one_of(kind, of, True if answer.status_code == 200 else None)
                if answer.status_code == 200:
                    status, gone = (
                        answer.json(),
                        sum(self.done[f"{of}-{n}"] for n in range(ROLLOUTS)),
                    )
                    left = status["queued"] + status["leased"] + status["finished"]
                    assert left <= ROLLOUTS - gone, (of, status, gone)

    def is_one_of(self, kind: str, of: Any, value: Any) -> None:
        assert value in self.may_be[kind, of], (kind, of, value, self.may_be[kind, of])
        self.may_be[kind, of] = {value}


@pytest.mark.soak("F9", KILLS, "kills while policies, pins, reviews and rollouts change")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 3600))
def test_a_change_is_there_once_or_not_whenever_the_server_is_killed(tmp_path: Path) -> None:
    draw = random.Random(drawn_seed())
    changes = Changes(draw)
    with StubServer(tmp_path / "data", settings="keep_checkpoints = 100\n") as server:
        with server.http() as http:
            for step in range(VERSIONS):
                train_once(http, step)
        for _ in range(KILLS):
            killer = threading.Timer(draw.uniform(0.0, 0.02), server.kill)
            with server.http() as http:
                for _ in range(draw.randint(8, 16)):
                    changes.one(http)
                killer.start()
                try:
                    while True:
                        changes.one(http)
                except httpx.TransportError:
                    killer.join()
            server.start()
            with server.http() as http:
                changes.check(http)
        with server.http() as http:  # at the end all rollouts of all batches are there to be taken
            changes.held = {}
            batches = [
                n for (kind, n), at in changes.may_be.items() if kind == "batch" and True in at
            ]
            while http.get("/status").json()["rollouts"].keys() & {"queued", "leased"}:
                for one in http.post("/v1/rollouts/lease", json=LEASE).json()["leases"]:
                    run = one["trajectory_id"]
                    body = {"trajectory_id": run, "trajectory": {"id": run, "reward": 1.0}}
                    assert http.post(f"/v1/rollouts/{one['id']}/complete", json=body).is_success
            for batch in batches:
                changes.take(http, batch)
                status = http.get(f"/v1/rollouts/batches/{batch}").json()
                assert not (status["queued"] + status["leased"] + status["finished"]), status
    assert set(changes.acknowledged) == {"create", "roll_back", "pin", "review", "queue"}
    print(f"{sum(changes.acknowledged.values())} changes: {dict(changes.acknowledged)}")  # noqa: T201
