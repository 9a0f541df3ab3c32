"""Fits whose rollouts are run by workers, over a real server: kills, stops, failures."""

import json
import re
import signal
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from langchain_art import ArtClient, ConfigError, RolloutFailed, TrainConfig, Trainer
from langchain_art.rollout import queued_runs
from langchain_art.wire import QueuedRollout, ServerStatus
from tests.support import trainers
from tests.support.forked_start import ForkedProgram
from tests.support.leased_agent import NAME, command, rollout, start
from tests.support.soak import share
from tests.support.stub_engines import StubServer
from tests.support.trainers import said


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    data, small = tmp_path_factory.mktemp("leases") / "data", "max_body_bytes = 1_000_000\n"
    with StubServer(data, seconds=(0.0, 0.01), settings=small) as started:
        yield started


@contextmanager
def workers(server: StubServer, count: int, **options: Any) -> Generator[list[ForkedProgram]]:
    """Workers that are known to the server, by the order of their start."""
    with ExitStack() as stack:
        found: list[ForkedProgram] = []
        for _ in range(count):
            log = server.data_dir.parent / f"worker-{uuid.uuid4().hex}.log"
            found.append(start(server.base_url, log, **options))
            stack.callback(end, found[-1])
        names = {str(one.pid) for one in found}
        until(server, lambda seen: names <= {one.name.split(":")[1] for one in seen.workers})
        yield found


@contextmanager
def batch(server: StubServer, name: str) -> Generator[ArtClient]:
    with ArtClient(server.base_url) as client:
        try:
            yield client
        finally:
            client.cancel_rollouts(name)


def end(worker: ForkedProgram) -> dict[str, Any]:
    """What a worker says that it has done; empty if it was killed."""
    if worker.poll() is None:
        worker.send_signal(signal.SIGCONT)
        worker.terminate()
    worker.wait(timeout=60)
    [told] = re.findall(r"^\{.*\}$", worker.log.read_text(), re.MULTILINE) or ["{}"]
    return json.loads(told)


def until(server: StubServer, true: Callable[[ServerStatus], bool]) -> ServerStatus:
    deadline = time.monotonic() + 60
    with ArtClient(server.base_url) as client:
        while not true(seen := client.status()):
            assert time.monotonic() < deadline, seen
            time.sleep(0.02)
    return seen


def held(seen: ServerStatus, worker: ForkedProgram) -> int:
    return sum(one.leased for one in seen.workers if one.name.endswith(f":{worker.pid}"))


def trainer(server: StubServer, out: Path, **options: Any) -> Trainer:
    config = TrainConfig(learning_rate=1e-4)
    known: dict[str, Any] = {"config": config, "workers": "server", "lora": None} | options
    return trainers.trainer_of(server, out, server.policy, **known)


def scenarios(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"id": f"q-{n}", "q": n, **more} for n in range(count)]


def ids(server: StubServer, query: str) -> set[str]:
    with sqlite3.connect(server.data_dir / "art.sqlite3") as connection:
        return {row[0] for row in connection.execute(query)}


def test_a_run_that_fails_or_cannot_be_stored_fails_alone(
    server: StubServer, tmp_path: Path
) -> None:
    given = [*scenarios(1), {"id": "lone", "q": 1, "spoils": True}]
    wrong = [*scenarios(1), {"id": "q-1", "q": 1, "raises": True}]
    with workers(server, 1, concurrency=8) as [worker]:
        [step] = trainer(server, tmp_path / "spoils").fit_sync(NAME, given, steps=1).history
        with pytest.raises(RolloutFailed, match=r"ValueError: no such tool \(scenario 'q-1'\)"):
            trainer(server, tmp_path / "none", max_failed=0.2).fit_sync(rollout, wrong, steps=1)
        until(server, lambda seen: not seen.rollouts)
        assert end(worker)["failed"] >= 5
    assert (step.failed, step.retried, step.runs) == (4, 0, 8)
    with ArtClient(server.base_url) as client:
        errors = {run.error for run in client.trajectories(20, "lone")}
    assert [str(one)[:44] for one in errors] == ["metadata.file: a text with the lone surrogat"]
    with pytest.raises(ConfigError, match=r"train_scenarios\[0\].*expected a JSON value"):
        trainer(server, tmp_path / "x").fit_sync(NAME, [{"q": "caf\udce9"}], steps=1)


def test_a_worker_that_was_stopped_has_its_late_attempt_discarded(
    server: StubServer, tmp_path: Path
) -> None:
    with workers(server, 1, concurrency=8) as [first], ExitStack() as stack:
        found: list[Any] = []

        def fit() -> None:
            given = scenarios(2, pause=1.0)
            found.append(trainer(server, tmp_path).fit_sync(NAME, given, steps=1))

        calls = "SELECT id FROM calls"
        before = len(ids(server, calls))
        fitting = threading.Thread(target=fit)
        fitting.start()
        until(server, lambda seen: held(seen, first) == 8)
        until(server, lambda _: len(ids(server, calls)) >= before + 8)  # of each the first
        first.send_signal(signal.SIGSTOP)
        [second] = stack.enter_context(workers(server, 1, concurrency=8))
        fitting.join()
        first.send_signal(signal.SIGCONT)
        time.sleep(1.5)  # its runs go on, or it hears that its leases are gone
        assert end(first)["discarded"] == 8
        end(second)
    [step] = found[0].history
    assert step.retried == 8 and step.failed == 0
    lost = "SELECT id FROM calls WHERE trajectory_id NOT IN (SELECT id FROM trajectories)"
    late = ids(server, lost)
    trained = ids(server, "SELECT call_id FROM trained_calls")
    assert len(late) >= 8 and len(trained) >= 16
    assert not late & trained


def test_the_command_drains_at_sigterm_and_says_what_it_did(
    server: StubServer, tmp_path: Path
) -> None:
    named = ("--server", server.base_url, "--concurrency", "3")
    worker = command("http://nobody:1", tmp_path / "log", NAME, *named)  # what is named wins
    with batch(server, "drained") as client:
        pauses = (0.0, 0.0, 60.0)
        tasks = [
            QueuedRollout(id=f"t-{n}", scenario={"q": n, "pause": p}) for n, p in enumerate(pauses)
        ]
        client.put_rollouts("drained", NAME, tasks)
        until(server, lambda seen: seen.rollouts == {"finished": 2, "leased": 1})
        worker.terminate()
        time.sleep(0.2)
        worker.terminate()
        assert worker.wait(120) == 0, worker.log.read_text()
        told = worker.log.read_text()
        assert "Stopping: 1 runs have 20 s to end" in told
        assert "2 runs finished, 0 of them failed, 1 handed back." in told
        status = client.rollouts("drained")
        assert (status.queued, status.expired, status.workers) == (1, 0, 0)


def test_a_fit_without_workers_says_what_to_type_and_waits(
    server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not share():
        monkeypatch.setattr(queued_runs, "_HOLD_ALONE", 0.3)
        monkeypatch.setattr(queued_runs, "_ALONE", 0.2)
    waiting = trainer(server, tmp_path)
    fitting = threading.Thread(
        target=waiting.fit_sync, args=(rollout, scenarios(2)), kwargs={"steps": 1}
    )
    fitting.start()
    words = f"type: langchain-art worker {NAME} --server {server.base_url}"
    while words not in said(waiting):
        assert fitting.is_alive(), said(waiting)
        time.sleep(0.05)
    assert f"No worker runs {NAME}: 8 rollouts wait." in said(waiting)
    with workers(server, 1, concurrency=8):
        fitting.join(60)
    assert not fitting.is_alive()
    assert f"1 worker runs {NAME} now." in said(waiting)


def test_a_program_that_is_wrong_ends_the_fit(server: StubServer, tmp_path: Path) -> None:
    name = "tests.support.leased_agent:no_run"
    worker = command(server.base_url, tmp_path / "log", name)
    try:
        with pytest.raises(ConfigError, match=r"returned 'done' for .*expected the run"):
            trainer(server, tmp_path / "fit").fit_sync(name, scenarios(2), steps=1)
    finally:
        worker.terminate()
        worker.wait(120)


def test_scenarios_that_are_too_large_for_one_request_are_put_up_in_parts(
    server: StubServer,
) -> None:
    with batch(server, "large") as client:
        document = "x" * 120_000  # ten are more than the server takes at once
        tasks = [QueuedRollout(id=f"large-{n}", scenario={"d": document}) for n in range(10)]
        client.put_rollouts("large", NAME, tasks)
        assert client.rollouts("large").queued == len(tasks)


# The last one: for a while, the server counts the worker that was killed.
def test_a_killed_workers_rollouts_are_run_by_another_and_trained_once(
    server: StubServer, tmp_path: Path
) -> None:
    trained = "SELECT trajectory_id FROM trained"
    before = ids(server, trained)
    with workers(server, 2) as (first, second):

        def kill() -> None:
            until(server, lambda seen: held(seen, first) >= 2)
            first.kill()

        killing = threading.Thread(target=kill)
        killing.start()
        result = trainer(server, tmp_path).fit_sync(
            rollout, scenarios(16, pause=0.2), steps=2, eval_scenarios=scenarios(2)
        )
        killing.join()
        assert end(second)["discarded"] == 0
    assert [step.failed for step in result.history] == [0, 0]
    assert sum(step.retried for step in result.history) >= 1
    assert result.before is not None and result.after is not None and result.after.n == 2
    assert len(ids(server, trained) - before) == 2 * 2 * 4
