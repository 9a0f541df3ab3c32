"""Several servers on one PostgreSQL: one version everywhere, one job at a time, none done twice."""

import os
import queue
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import sqlalchemy as sa
from pydantic_core import from_json

from langchain_art.client.sync_client import ArtClient
from langchain_art.wire import FinishedRollout, QueuedRollout
from langchain_art.wire.api_keys import new_api_key
from langchain_art_server.backends.models.adapter_files import check_files
from langchain_art_server.backups import DUMP, back_up
from langchain_art_server.storage.schema import connect
from tests.support import leased_agent, steps_of_a_fit
from tests.support.fleet_server import LEASE_SECONDS, lasting
from tests.support.hot_swap import train_once
from tests.support.live_server import ForkedServer
from tests.support.postgres import Postgres, programs
from tests.support.seeds import drawn_seed
from tests.support.soak import count, in_soak
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
        """True if the process has stopped itself, or was stopped."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def thaw(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)


class Gateways:
    """A fleet of two servers; one that is killed is the test's to start again."""

    def __init__(self, folder: Path, postgres: Postgres) -> None:
        self.folder, self.url = folder, postgres.database()
        self.stop_file = folder / "stop"
        env = {"STOP_FILE": str(self.stop_file), "ART_API_KEY": new_api_key()}
        (folder / "fleet.toml").write_text(
            "fleet = true\nkeep_checkpoints = 1000\nmax_policies = 1000\n"
        )
        args = ("--config", str(folder / "fleet.toml"), "--database-url", self.url)
        self.all = [Gateway(folder, number, folder / "data", *args, env=env) for number in range(2)]

    def __enter__(self) -> Self:
        for one in self.all:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.all:
            one.stop()

    def rows(self, query: str, **values: Any) -> list[Any]:
        """The rows that a query of the database gives."""
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


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Gateways]:
    with Gateways(tmp_path_factory.mktemp("fleet"), postgres) as made:
        yield made


@pytest.fixture
def fleet(started: Gateways) -> Iterator[Gateways]:
    """The fleet of this file; a test that fails leaves no server of it stopped for the next."""
    yield started
    for file in (started.stop_file, lasting(started.stop_file)):
        file.unlink(missing_ok=True)
    for one in started.all:
        if one.process is not None and one.process.poll() is None:
            one.thaw()


def test_what_one_server_does_the_other_knows(fleet: Gateways) -> None:
    one, other = fleet.all
    policy = make_policy(fleet, "shared")
    assert said(other, policy).json()["model"] == f"{policy}@0", "a policy is known at once"
    for step, (mine, theirs) in enumerate([(one, other), (other, one)], 1):
        with mine.http() as http:
            train_once(http, step - 1, policy)
        routes_to(theirs, policy, f"{policy}@{step}")
    with one.http() as first, other.http() as second:
        assert first.get("/status").json()["calls"] == second.get("/status").json()["calls"]
        first.post(f"/v1/policies/{policy}/rollback", json={"version": 1}).raise_for_status()
        routes_to(other, policy, f"{policy}@1")
        second.delete(f"/v1/policies/{policy}/checkpoints/2").raise_for_status()
        knows_no(one, f"{policy}@2")
        assert f'="{policy}"' in first.get("/metrics").text
        second.delete(f"/v1/policies/{policy}").raise_for_status()
        knows_no(one, policy)
        for each in (first, second):
            assert f'="{policy}"' not in each.get("/metrics").text


def knows_no(gateway: Gateway, model: str) -> None:
    """Calls of `model` that are sent `SOON` from now, or before it, are answered 404."""
    soon, sent = time.monotonic() + SOON, time.monotonic()
    while said(gateway, model).status_code != 404:
        assert sent < soon, f"{model} is stale"
        sent = time.monotonic()


def test_a_server_with_another_base_model_is_refused(fleet: Gateways) -> None:
    args = ("--config", str(fleet.folder / "fleet.toml"), "--database-url", fleet.url)
    args = (*args, "--served-model-name", "another")
    env = {"STOP_FILE": str(fleet.stop_file), "ART_API_KEY": fleet.all[0].api_key}
    other = Gateway(fleet.folder, 2, fleet.folder / "data", *args, env=env)
    assert "another base model than this one: 'another', unq" in other.refusal()
    assert said(fleet.all[0], "tiny").status_code == 200


def test_a_run_through_both_servers_trains_the_tokens_that_were_sampled(fleet: Gateways) -> None:
    """A reply goes on in the other server's prompt with its own tokens, not with those of its text.

    A random model's replies are hardly ever what the tokenizer makes of their text.
    """
    policy, records = make_policy(fleet, "split"), list[Any]()
    for seed in range(4):
        run, messages = f"split-{seed}", list[Any](QUESTION)
        for turn in range(3):
            gateway = fleet.all[turn % 2]
            more = {"messages": messages, "max_tokens": 12, "temperature": 1.5, "seed": seed}
            answer = said(gateway, policy, **more, art={"trajectory_id": run}).json()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            with gateway.http() as http:
                records.append(http.get(f"/v1/calls/{answer['id']}").json())
        began = [call["began"] for call in records[-3:]]
        assert began == sorted(began), "calls are in the order in which they began"
        for earlier, later in zip(records[-3:], records[-2:], strict=False):
            whole = earlier["prompt_token_ids"] + earlier["token_ids"]
            assert later["prompt_token_ids"][: len(whole)] == whole
        with fleet.all[seed % 2].http() as http:
            reward = {"reward": float(seed % 2)}
            kept = http.put(f"/v1/trajectories/{run}/reward", json=reward).json()
            assert [turn["call_id"] for turn in kept["turns"]] == [c["id"] for c in records[-3:]]
    for gateway in fleet.all:
        assert policy not in trained(gateway)
    runs = [f"split-{seed}" for seed in range(4)]
    job = ended(fleet.all[1], order(fleet.all[0], policy, runs, "split"))
    assert job["state"] == "succeeded", job["error"]
    sampled = sum(len(call["token_ids"]) for call in records)
    assert job["result"]["metrics"]["tokens_trained"] == sampled
    assert order(fleet.all[1], policy, runs, "split")["id"] == job["id"], "a key is a key on both"
    for gateway in fleet.all:  # whichever ran it
        assert policy in trained(gateway)


def trained(gateway: AnyGateway) -> list[str]:
    """The policies of whose steps the page's overview of this server tells."""
    with gateway.http() as http:
        series = http.get("/page/overview").raise_for_status().json()["series"]
    return [one["policy"] for one in series if one["steps"]]


MOMENTS = ("in the transaction", "after the rename", "after the step")


@in_soak  # `test_a_holder_that_wakes_while_the_other_works_publishes_nothing`
@pytest.mark.soak("G2", len(MOMENTS), "moments at which the holder of a job sleeps")
@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_holder_that_slept_publishes_nothing(fleet: Gateways, moment: str) -> None:
    """It stops at a moment of its job, the other server does the job, and it wakes."""
    policy = make_policy(fleet, moment.replace(" ", "-"))
    runs = make_runs(fleet.all, policy, "1")
    fleet.stop_file.write_text(moment)
    job = order(fleet.all[0], policy, runs, policy)
    holder, other = stopped(fleet)
    job = ended(other, job)
    assert job["state"] == "succeeded", job["error"]
    version, folder = job["result"]["version"], fleet.folder / "data" / "adapters" / policy
    published = (folder / str(version) / "manifest.json").read_bytes()
    holder.thaw()
    routes_to(holder, policy, f"{policy}@{version}")
    newest = version
    for gateway in fleet.all:  # what it would still write it has tried by now
        routes_to(gateway, policy, f"{policy}@{newest}")  # what it samples is not to be stale
        again = make_runs([gateway], policy, gateway.log.stem)
        done = ended(other, order(gateway, policy, again, f"{policy}-{gateway.log.stem}"))
        assert done["state"] == "succeeded", done["error"]
        newest = done["result"]["version"]
    assert (folder / str(version) / "manifest.json").read_bytes() == published
    versions = {int(one.name) for one in folder.iterdir()}
    rows = fleet.rows("SELECT version FROM checkpoints WHERE policy = :p", p=policy)
    assert versions == {row.version for row in rows} and len(versions) == 4
    for one in versions:
        check_files(folder / str(one))
    made = [from_json((folder / str(n) / "manifest.json").read_bytes())["job"] for n in versions]
    assert len(set(made)) == 4, "each job made one version"
    trained = fleet.rows("SELECT trajectory_id FROM trained WHERE policy = :p", p=policy)
    assert len(trained) == len({row.trajectory_id for row in trained}) == 12
    with other.http() as http:
        events = http.get(f"/v1/jobs/{job['id']}/events").json()["data"]
    assert [one["message"] for one in events].count(f"{policy}@{version} serves") == 1


def test_a_holder_that_wakes_while_the_other_works_publishes_nothing(fleet: Gateways) -> None:
    """It wakes just before it renames and commits; the other one renews its lease, and steps."""
    policy = make_policy(fleet, "both")
    job = order(fleet.all[0], policy, make_runs(fleet.all, policy, "1"), policy)
    assert ended(fleet.all[0], job)["result"]["version"] == 1
    for gateway in fleet.all:
        routes_to(gateway, policy, f"{policy}@1")
    runs = make_runs(fleet.all, policy, "2")
    fleet.stop_file.write_text("before the rename")
    job = order(fleet.all[0], policy, runs, f"{policy}-2")
    holder, other = stopped(fleet)
    fleet.stop_file.write_text("the step")
    until, step = time.monotonic() + 60, lasting(fleet.stop_file)
    while not step.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(LEASE_SECONDS)
    folder = fleet.folder / "data" / "adapters" / policy
    holder.thaw()
    while not (folder / "2").exists():
        assert time.monotonic() < until
    time.sleep(SOON)
    rows = "SELECT version FROM checkpoints WHERE policy = :p ORDER BY version"
    assert [row.version for row in fleet.rows(rows, p=policy)] == [0, 1], "it published"
    assert said(holder, f"{policy}@2").status_code == 404, "what it wrote is served"
    step.unlink()
    job = ended(other, job)
    assert job["state"] == "succeeded", job["error"]
    assert job["result"]["version"] == 3, "a name that may be on another's disk is not used"
    routes_to(holder, policy, f"{policy}@3")
    assert [row.version for row in fleet.rows(rows, p=policy)] == [0, 1, 3]
    last = order(holder, policy, make_runs(fleet.all, policy, "3"), f"{policy}-3")
    assert ended(holder, last)["result"]["version"] == 4
    assert sorted(int(one.name) for one in folder.iterdir()) == [0, 1, 3, 4], "it is swept up"
    made = {check_files(folder / str(n))["job"] for n in (1, 3, 4)}
    assert len(made) == 3, "each job made one version"
    trained = fleet.rows("SELECT trajectory_id FROM trained WHERE policy = :p", p=policy)
    assert len(trained) == len({row.trajectory_id for row in trained}) == 12
    with other.http() as http:
        events = http.get(f"/v1/jobs/{job['id']}/events").json()["data"]
    assert [one["message"] for one in events].count(f"{policy}@3 serves") == 1


def test_a_job_of_the_other_server_is_cancelled(fleet: Gateways) -> None:
    policy = make_policy(fleet, "cancelled")
    runs = make_runs(fleet.all, policy, "1")
    fleet.stop_file.write_text("before the step")
    job = order(fleet.all[0], policy, runs, policy)
    holder, other = stopped(fleet)
    with other.http() as http:
        cancelled = http.post(f"/v1/jobs/{job['id']}/cancel").raise_for_status().json()
        assert cancelled["state"] == "cancelled"
    holder.thaw()
    time.sleep(SOON)
    assert ended(holder, job)["state"] == "cancelled"
    again = ended(other, order(other, policy, make_runs(fleet.all, policy, "2"), "again"))
    assert again["state"] == "succeeded"
    rows = fleet.rows("SELECT version FROM checkpoints WHERE policy = :p", p=policy)
    assert sorted(row.version for row in rows) == [0, again["result"]["version"]]


@pytest.mark.slow
def test_a_tenant_and_a_backup_are_of_all_servers(
    fleet: Gateways, tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backup is a dump with its tenants, and adapters: a server on them goes on."""
    monkeypatch.setenv("PATH", f"{programs()}{os.pathsep}{os.environ['PATH']}")  # pg_dump's
    (one, other), place = fleet.all, tmp_path / "backup"
    servers_key = one.api_key
    with ArtClient(one.base_url, api_key=servers_key) as administrator:
        key = administrator.create_key("one", tenant="ana").key
    until = time.monotonic() + 60
    monkeypatch.setattr(one, "api_key", key)
    with other.http(key) as http:
        while http.post("/v1/policies", json={"name": "own"}).status_code == 401:
            assert time.monotonic() < until, "the key is not known on the other server"
            time.sleep(0.05)
        train_once(http, 0, "own")
        routes_to(one, "own", "own@1")
        named, damaged = back_up(fleet.folder / "data", place, fleet.url)
        train_once(http, 1, "own")  # which is not in it
    assert not damaged and named[Path("tenants", "ana")] == {("own", 0), ("own", 1)}
    assert named.keys() == {Path(), Path("tenants", "ana")} and ("tiny", 0) in named[Path()]
    url = postgres.database()
    options = ["--single-transaction", "--no-owner", f"--dbname={url.replace('+psycopg', '')}"]
    subprocess.run(["pg_restore", *options, place / DUMP], check=True, timeout=60)
    env = {"ART_API_KEY": servers_key}
    with ForkedServer(place, "--database-url", url, env=env) as again, again.http(key) as http:
        train_once(http, 1, "own")


# --- under load ----------------------------------------------------------------------------------

KILLS = count(1, 10)
CLIENTS, PER_STEP = 4, 4


class Answered(NamedTuple):
    """A call that was answered, by which server, and when it was sent."""

    id: str
    version: int
    by: int
    sent: float


@in_soak  # kills of a server and its leases: `test_a_server_is_killed_under_load`, `test_leases`
@pytest.mark.slow
def test_two_servers_lease_rollouts_out_and_one_is_killed(
    fleet: Gateways, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is run to its end once, by a worker of the server that is left, or of both."""
    rollouts = [
        QueuedRollout(id=f"lent-{n}", scenario={"id": f"q-{n}", "q": n, "pause": 0.2})
        for n in range(24)
    ]
    one, other = fleet.all
    monkeypatch.setenv("ART_API_KEY", one.api_key)
    with ExitStack() as stack:
        working = [
            leased_agent.start(gateway.base_url, tmp_path / f"worker-{number}.log", 1.0, 2)
            for number, gateway in enumerate(fleet.all)
        ]
        for worker in working:
            stack.callback(worker.wait)
            stack.callback(worker.kill)
        with ArtClient(one.base_url) as client:
            names = {f":{worker.pid}" for worker in working}

            def wait(leased: bool) -> None:
                while names > {
                    f":{w.name.split(':')[1]}"
                    for w in client.status().workers
                    if w.leased or not leased
                }:
                    time.sleep(0.01)

            wait(leased=False)  # else one could do all before the other has started
            client.put_rollouts("lent", leased_agent.NAME, rollouts)
            wait(leased=True)
            other.kill()
            stack.callback(other.start)  # for the other tests of this fleet
            taken: dict[str, FinishedRollout] = {}
            while len(taken) < len(rollouts):
                found = client.take_rollouts("lent", list(taken), wait=5)
                assert not taken.keys() & {finished.id for finished in found.finished}
                taken |= {finished.id: finished for finished in found.finished}
            expired = client.rollouts("lent").expired
        kept = {row.id for row in fleet.rows("SELECT id FROM calls")}
    runs = [finished.trajectory for finished in taken.values() if finished.trajectory]
    assert len({run.id for run in runs}) == len(rollouts)
    assert {turn.call_id for run in runs for turn in run.turns} <= kept
    assert {run.metadata["pid"] for run in runs} <= {worker.pid for worker in working}
    assert expired >= 1, "what the killed server's worker had went to the other one"


#: Steps so small that what another version has sampled, or two of them, can be trained.
LIGHT = {"learning_rate": 1e-5, "max_logprob_gap": 1.0}


@pytest.mark.soak("G1", KILLS, "kills of one of two gateways under load")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 1800))
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_is_killed_under_load(fleet: Gateways) -> None:
    draw, policy = random.Random(drawn_seed()), make_policy(fleet, "loaded")
    trains, stop, done = AnyGateway(fleet), threading.Event(), queue.SimpleQueue[str]()
    calls = list[Answered]()

    def ask(number: int) -> None:
        """Runs of two calls, the second through the other server."""
        client, made = AnyGateway(fleet, number), 0
        while not stop.is_set():
            made += 1
            run, messages = f"load-{number}-{made}", list[Any](QUESTION)
            for _ in range(2):
                body = {"model": policy, "messages": messages, "max_tokens": 8, "seed": made}
                body["art"] = {"trajectory_id": run}
                answer = client.ok("POST", "/v1/chat/completions", body)
                version = int(answer["model"].rpartition("@")[2])
                calls.append(Answered(answer["id"], version, client.at, client.sent))
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            reward = {"reward": made % 7 + number / 10}  # a group has several
            client.ok("PUT", f"/v1/trajectories/{run}/reward", reward)
            done.put(run)

    def kill(victim: Gateway, after: float, away: float) -> None:
        time.sleep(after)
        victim.kill()
        time.sleep(away)
        victim.start()

    clients = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(CLIENTS)]
    for one in clients:
        one.start()
    steps = 2 * KILLS + 1  # one is taken while a server is killed, the next with both
    for number in range(steps):
        victim, pauses = draw.choice(fleet.all), (draw.uniform(0.0, 1.0), draw.uniform(0.0, 1.0))
        killer = threading.Thread(target=kill, args=(victim, *pauses))
        if number % 2:
            killer.start()
        runs = [done.get(timeout=60) for _ in range(PER_STEP)]
        while not done.empty():  # the newest, which are not too stale to be trained
            runs = [*runs[1:], done.get()]
        body = {"policy": policy, "groups": [runs], "config": LIGHT}
        trains.train(f"load-{number}", body)
        if number % 2:
            killer.join()
    stop.set()
    for one in clients:
        one.join()
    kept = {row.id for row in fleet.rows("SELECT id FROM calls")}
    assert {call.id for call in calls} <= kept, "a call that was answered is lost"
    jobs = fleet.rows("SELECT * FROM jobs WHERE policy = :p ORDER BY number", p=policy)
    assert {row.state for row in jobs} == {"succeeded"} and len(jobs) == steps
    versions = [row.target_version for row in jobs]
    assert versions == sorted(set(versions)), "each job made one version, in order"
    rows = fleet.rows("SELECT trajectory_id FROM trained WHERE policy = :p", p=policy)
    assert len(rows) == len({row.trajectory_id for row in rows}) == PER_STEP * len(jobs)
    folder = fleet.folder / "data" / "adapters" / policy
    for row in jobs:
        assert check_files(folder / str(row.target_version))["job"] == row.id
    serves = fleet.rows(
        "SELECT job_id FROM job_events WHERE message LIKE :m", m=f"{policy}@% serves"
    )
    assert len(serves) == len({row.job_id for row in serves}) == len(jobs)
    # How long after a version was published a call was still routed to one before it, by this
    # machine's clock: when it was sent, and when the job wrote its end, just before it published.
    late = sorted(
        max([0.0, *(c.sent - row.finished_at for c in calls if c.by == by and c.version < version)])
        for (row, version), by in product(zip(jobs, versions, strict=True), (0, 1))
    )
    assert late[-1] <= SOON, "a call was routed to a version of before"
    print(  # noqa: T201
        f"{KILLS} kills, {len(jobs)} jobs, {len(calls)} calls answered; the last stale call to a "
        f"server was sent after publishing: max {1000 * late[-1]:.0f} ms, "
        f"median {1000 * late[len(late) // 2]:.0f} ms"
    )
