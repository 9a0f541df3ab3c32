"""Submit, judge, train, roll back, lease, crash, in any order: the server does as a model does.

The model is a few sets and dictionaries. The server is the real one, over engines that compute
nothing (`tests.support.stub_engines`); a crash is a kill -9 of its process.
"""

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pydantic_core import from_json

from tests.support.engines import engines
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.storms import Patient
from tests.support.stub_engines import StubServer, marked

SEQUENCES, STEPS = count(5, 500), count(16, 50)  # the first two are the simplest ones
#: Of a sequence: a start takes longer than all else.
CRASHES = count(1, 50)
#: The mean of at most six of them is none of them, unless all are equal.
REWARDS = st.sampled_from([0.0, 1.0, 10.0])
WEIGHTS = "adapter_model.safetensors"


class Model:
    """What a policy should be after what was done to it."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {0: None}
        self.kept, self.pinned, self.serving = {0}, set[int](), 0
        #: Run -> the version that sampled it, and its reward; version -> runs that it learned from.
        self.sampled: dict[str, int] = {}
        self.rewards: dict[str, float | None] = {}
        self.learned: dict[int, set[str]] = {0: set()}

    def lineage(self) -> list[int]:
        """The version that serves, its parent, and so on."""
        found, version = list[int](), self.serving
        while version is not None:
            found.append(version)
            version = self.parents[version]
        return found

    def train(self, runs: list[str], max_staleness: int | None) -> str:
        """Take a step; returns why it was none, or ""."""
        lineage = self.lineage()
        done = set[str]().union(*(self.learned[version] for version in lineage))
        scored = [run for run in runs if run not in done and self.rewards[run] is not None]
        if not scored:
            return "groups.empty"
        if any(self.sampled[run] not in lineage for run in scored):
            return "groups.rolled_back"
        oldest = max(lineage.index(self.sampled[run]) for run in scored)
        if max_staleness is not None and oldest > max_staleness:
            return "groups.stale"
        if len(scored) == 1:
            return "groups.single"
        if len({self.rewards[run] for run in scored}) == 1:
            return "groups.zero_variance"
        version = max(self.parents) + 1
        self.parents[version], self.learned[version] = self.serving, set(scored)
        self.kept.add(version)
        self.serving = version
        return ""


class Machine(RuleBasedStateMachine):
    server: ClassVar[StubServer]
    numbers: ClassVar[Iterator[int]] = itertools.count()
    published: ClassVar[int] = 0
    taken: ClassVar[int] = 0
    runs, jobs = Bundle("runs"), Bundle("jobs")

    @initialize()
    def begin(self) -> None:
        self.policy = f"p-{next(self.numbers)}"
        self.model, self.client, self.crashes = Model(), Patient(self.server), 0
        #: Batch -> its rollouts that have not been taken -> state; a leased rollout -> its attempt.
        self.batches: dict[str, dict[str, str]] = {}
        self.held: dict[str, str] = {}
        self.client.ok("POST", "/v1/policies", {"name": self.policy})

    # --- what clients do ------------------------------------------------------------------------

    @rule(target=runs, many=st.integers(1, 4))
    def submit(self, many: int) -> Any:
        return multiple(*(self._submit() for _ in range(many)))

    def _submit(self) -> str:
        run = f"{self.policy}-{len(self.model.sampled)}"
        ask = [{"role": "user", "content": run}]
        body: dict[str, Any] = {"model": self.policy, "messages": ask}
        answer = self.client.ok("POST", "/v1/chat/completions", body)
        assert answer["model"] == f"{self.policy}@{self.model.serving}"
        call = self.client.ok("GET", f"/v1/calls/{answer['id']}")
        assert marked(call, self._folder(self.model.serving) / WEIGHTS), "of another version"
        body = {"id": run, "turns": [{"call_id": answer["id"]}]}
        stored = self.client.ok("POST", "/v1/trajectories", body)["stored"]
        assert stored or self.client.resent
        assert not self.client.ok("POST", "/v1/trajectories", body)["stored"]
        assert self.client.ask("POST", "/v1/trajectories", body | {"reward": 7.0}).is_client_error
        self.model.sampled[run], self.model.rewards[run] = self.model.serving, None
        return run

    @rule(run=runs, reward=REWARDS)
    def judge(self, run: str, reward: float) -> None:
        answer = self.client.ask("PUT", f"/v1/trajectories/{run}/reward", {"reward": reward})
        used = any(run in learned for learned in self.model.learned.values())
        if used and self.model.rewards[run] != reward:
            assert answer.status_code == 409, answer.text
        else:
            assert answer.status_code == 200, answer.text
            self.model.rewards[run] = reward

    @rule(
        target=jobs,
        runs=st.lists(runs, min_size=2, max_size=6, unique=True),
        rewards=st.lists(REWARDS, min_size=6, max_size=6),
        staleness=st.sampled_from([None, None, 0, 1, 2]),
        crash=st.sampled_from([None, None, None, None, None, None, 0.0, 0.02]),
    )
    def train(
        self, runs: list[str], rewards: list[float], staleness: int | None, crash: float | None
    ) -> Any:
        for run, reward in zip(runs, rewards, strict=False):
            if self.model.rewards[run] is None:
                self.judge(run, reward)
        key = f"{self.policy}-{next(self.numbers)}"
        config = {"max_staleness": staleness, "learning_rate": 1e-4}
        body = {"policy": self.policy, "groups": [runs], "config": config}
        base, highest = self.model.serving, max(self.model.parents)
        why = self.model.train(runs, staleness)
        if crash is not None:
            self.client.ok("POST", "/v1/train", body, **{"Idempotency-Key": key})
            time.sleep(crash)
            self.crash()
        job = self.client.train(key, body)
        assert job["base_version"] == base
        assert job["result"]["version"] == self.model.serving, (job, why)
        if why:
            assert why in job["result"]["excluded"], (job, why)
        else:
            assert self.model.serving == highest + 1
            Machine.published += 1
            manifest = from_json((self._folder(self.model.serving) / "manifest.json").read_bytes())
            assert set(manifest["trained"]) == self.model.learned[self.model.serving]
            assert (manifest["job"], manifest["parent"]) == (job["id"], base)
        return key, body, job["id"]

    @rule(job=jobs)
    def order_again(self, job: Any) -> None:
        key, body, name = job
        again = self.client.ask("POST", "/v1/train", body, **{"Idempotency-Key": key})
        assert (again.json()["id"], again.json()["state"]) == (name, "succeeded")
        other = body | {"groups": [body["groups"][0][1:]]}
        answer = self.client.ask("POST", "/v1/train", other, **{"Idempotency-Key": key})
        assert answer.status_code == 409, answer.text

    # --- what operators do ----------------------------------------------------------------------

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.model.parents)))
        path = f"/v1/policies/{self.policy}/rollback"
        answer = self.client.ask("POST", path, {"version": version})
        if version in self.model.kept:
            assert answer.json()["version"] == version
            self.model.serving = version
        else:
            assert answer.status_code == 404, answer.text

    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        version = data.draw(st.sampled_from(sorted(self.model.kept)))
        path = f"/v1/policies/{self.policy}/checkpoints/{version}/pin"
        self.client.ok("PUT" if pinned else "DELETE", path)
        (self.model.pinned.add if pinned else self.model.pinned.discard)(version)

    @precondition(lambda self: len(self.model.kept) > 1)
    @rule(data=st.data())
    def delete_version(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.model.kept)))
        path = f"/v1/policies/{self.policy}/checkpoints/{version}"
        answer = self.client.ask("DELETE", path)
        if version == self.model.serving or version in self.model.pinned:
            assert answer.status_code == 400, answer.text
        else:
            assert answer.status_code in (200, 404), answer.text
            self.model.kept.discard(version)

    @rule(run=consumes(runs))
    def delete_run(self, run: str) -> None:
        self.client.ok("DELETE", f"/v1/trajectories/{run}")
        assert self.client.ask("GET", f"/v1/trajectories/{run}").status_code == 404
        self.model.rewards.pop(run)

    # --- what workers do ------------------------------------------------------------------------

    @rule(free=st.integers(1, 4), most=st.integers(1, 4))
    def work(self, free: int, most: int) -> None:
        """A batch is put up; of what is leased some is completed."""
        batch = f"{self.policy}-{len(self.batches)}"
        rollouts = [{"id": f"{batch}-{n}", "scenario": {}} for n in range(2)]
        body = {"batch": batch, "rollout": self.policy, "rollouts": rollouts}
        self.client.ok("POST", "/v1/rollouts", body)
        self.batches[batch] = {one["id"]: "queued" for one in rollouts}
        body = {"worker": self.policy, "name": "w", "rollout": self.policy, "slots": 9}
        body |= {"free": free, "seconds": 600.0, "holds": [*self.held.values()]}
        for one in self.client.ok("POST", "/v1/rollouts/lease", body)["leases"]:
            states = self.batches[one["id"].rpartition("-")[0]]
            assert states[one["id"]] == "queued", f"{one['id']} is leased once more"
            states[one["id"]], self.held[one["id"]] = "leased", one["trajectory_id"]
        for rollout in sorted(self.held)[:most]:
            run = self.held.pop(rollout)
            body = {"trajectory_id": run, "trajectory": {"id": run, "reward": 1.0}}
            self.client.ok("POST", f"/v1/rollouts/{rollout}/complete", body)
            self.batches[rollout.rpartition("-")[0]][rollout] = "finished"

    @precondition(lambda self: any("finished" in one.values() for one in self.batches.values()))
    @rule()
    def take(self) -> None:
        for batch, states in self.batches.items():
            path, done = f"/v1/rollouts/batches/{batch}/take", list[str]()
            while found := self.client.ok("POST", path, {"done": done})["finished"]:
                done = [one["id"] for one in found]
                assert {states.pop(one) for one in done} == {"finished"}
                Machine.taken += 1

    # --- what happens ---------------------------------------------------------------------------

    @precondition(lambda self: self.crashes < CRASHES)
    @rule()
    def crash(self) -> None:
        self.crashes += 1
        self.server.kill()
        self.server.start()

    @rule()
    def engine_dies(self) -> None:
        for pid in engines(self.server):
            os.kill(pid, signal.SIGKILL)

    @invariant()
    def is_as_the_model_is(self) -> None:
        path = f"/v1/policies/{self.policy}"
        assert self.client.ok("GET", path)["version"] == self.model.serving
        kept = self.client.ok("GET", f"{path}/checkpoints")["data"]
        assert {one["version"] for one in kept} == self.model.kept
        assert {one["version"] for one in kept if one["pinned"]} == self.model.pinned
        assert [one["version"] for one in kept if one["serving"]] == [self.model.serving]
        on_disk = self._folder(0).parent.iterdir()
        assert {int(one.name) for one in on_disk} == self.model.kept
        for batch, states in self.batches.items():
            status = self.client.ok("GET", f"/v1/rollouts/batches/{batch}")
            for state in ("queued", "leased", "finished"):
                assert status[state] == [*states.values()].count(state), (batch, states, status)

    def teardown(self) -> None:
        for run, reward in self.model.rewards.items():
            assert self.client.ok("GET", f"/v1/trajectories/{run}")["reward"] == reward
        self.client.ok("DELETE", f"/v1/policies/{self.policy}")
        self.client.http.close()

    def _folder(self, version: int) -> Path:
        return self.server.data_dir / "adapters" / self.policy / str(version)


@pytest.mark.soak("T6", SEQUENCES, f"sequences of {STEPS} steps")
@pytest.mark.slow
@pytest.mark.timeout(count(600, 14_400))
def test_the_server_does_as_the_model_does(tmp_path: Path) -> None:
    keeps = "keep_checkpoints = 1000\n"
    Machine.server = StubServer(tmp_path / "data", settings=keeps).start()
    try:
        run_state_machine_as_test(
            seed(drawn_seed())(Machine),
            settings=settings(
                max_examples=SEQUENCES,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                phases=[Phase.generate],  # each sequence that it would shrink by takes seconds
                suppress_health_check=list(HealthCheck),
            ),
        )
        assert Machine.published and Machine.taken, "no sequence trained, or took, anything"
    finally:
        Machine.server.stop()
