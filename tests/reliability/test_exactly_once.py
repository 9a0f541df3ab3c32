"""Runs sent again and again, torn, late or changed are trained once, as they were first sent.

The engines compute nothing (`tests.support.stub_engines`): a version's weights are the digest of
its parent's and of the rows, so that they are equal only if all that was trained is.
"""

import asyncio
import contextlib
import random
import shutil
import socket
import statistics
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Self

import pytest
from pydantic_core import from_json

from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.storms import Killer, Patient
from tests.support.stub_engines import StubServer

GROUPS, KILLS = count(20, 500), count(2, 50)
#: Groups of a step, runs of a group, and clients that send at once.
STEP, RUNS, SENDERS = 10, 4, 16
SETTINGS = "keep_checkpoints = 1000\n"
#: Of each second run: 40 changed bodies, 1,000 in the soak.
CHANGES = ({"reward": 1000.0}, {"turns": []}, {"scenario": "s"})
LATEST = count(3, 20)
FAR = {"max_staleness": None, "learning_rate": 1e-4}


#: What happens to a connection, and how often: its answers may be lost, or its requests torn.
FATES = {"none": 5, "slow": 2, "reset": 2, "torn request": 2, "lost answer": 2, "half-close": 1}
#: Bytes after which a connection is cut are drawn up to this.
_CUT = 1500


class FaultyProxy:
    """Passes connections on to `port`, as badly as networks do. `met` counts what happened."""

    def __init__(self, port: int, seed: int) -> None:
        self._target, self._draw = port, random.Random(seed)
        self.met: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        start = asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error: object) -> None:
        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fate = self._draw.choices(list(FATES), list(FATES.values()))[0]
        self.met[fate] += 1
        try:
            theirs, ours = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # it is being started
            writer.transport.abort()
            return
        cut = self._draw.randrange(1, _CUT)
        forth, back = (
            cut if fate in ("torn request", "reset") else None,
            cut // 4 if fate == "lost answer" else None,
        )
        ways = [self._copy(reader, ours, forth, fate), self._copy(theirs, writer, back, fate)]
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if fate == "half-close":  # the client has said all; the answer is still passed on
                await asyncio.wait(tasks, timeout=2)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for one in (writer, ours):
                if fate == "reset":
                    linger = b"\1\0\0\0\0\0\0\0"  # close sends RST
                    with contextlib.suppress(OSError):
                        one.get_extra_info("socket").setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, linger
                        )
                one.transport.abort() if fate == "reset" else one.close()

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, most: int | None, fate: str
    ) -> None:
        """Until the end, or for `most` bytes."""
        passed = 0
        with contextlib.suppress(OSError):
            while data := await source.read(512 if fate == "slow" else 65536):
                if fate == "slow":
                    await asyncio.sleep(self._draw.uniform(0, 0.03))
                if most is not None:
                    data = data[: most - passed]
                passed += len(data)
                sink.write(data)
                await sink.drain()
                if fate == "half-close" and not sink.is_closing():
                    with contextlib.suppress(OSError):
                        sink.write_eof()
                    return
                if most is not None and passed >= most:
                    return


def sampled(client: Patient, run: str) -> dict[str, Any]:
    """A run of one call, with an arbitrary reward."""
    ask = {"model": "tiny", "messages": [{"role": "user", "content": run}]}
    call = client.ok("POST", "/v1/chat/completions", ask)["id"]
    return {"id": run, "turns": [{"call_id": call}], "reward": float(sum(map(ord, run)) % 7)}


def ledger(server: StubServer) -> dict[str, list[int]]:
    """Run -> the versions that learned from it."""
    found: dict[str, list[int]] = {}
    for folder in (server.data_dir / "adapters" / "tiny").iterdir():
        for run in from_json((folder / "manifest.json").read_bytes()).get("trained", []):
            found.setdefault(run, []).append(int(folder.name))
    return found


def order(groups: list[Any], config: dict[str, Any] = FAR) -> dict[str, Any]:
    ids = [[run["id"] for run in group["trajectories"]] for group in groups]
    return {"policy": "tiny", "groups": ids, "config": config}


@pytest.mark.soak("T1", GROUPS, f"groups, each sent 1-10 times; {KILLS} kills")
@pytest.mark.slow
@pytest.mark.timeout(count(600, 7200))
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_sent_many_times_through_a_bad_network_is_trained_once(tmp_path: Path) -> None:
    draw = random.Random(drawn_seed())
    server = StubServer(tmp_path / "data", settings=SETTINGS)
    with server, ThreadPoolExecutor(SENDERS) as pool:
        client = Patient(server)
        names = [f"{g}-{i}" for g in range(GROUPS) for i in range(RUNS)]
        runs = list(pool.map(lambda name: sampled(client, name), names))
        groups = [
            {"id": f"g{g}", "trajectories": runs[g * RUNS : (g + 1) * RUNS]} for g in range(GROUPS)
        ]
        steps = [groups[at : at + STEP] for at in range(0, GROUPS, STEP)]
        server.stop()
        shutil.copytree(server.data_dir, tmp_path / "stormy")
        server.start()
        for number, step in enumerate(steps):
            for group in step:
                client.ok("POST", "/v1/groups", group)
            sent = [run for group in step for run in group["trajectories"]]
            for run, change in zip(sent[::2], cycle(CHANGES), strict=False):
                other = run | change
                beside = {"id": "new", "trajectories": [{"id": "new"}, other]}
                assert client.ask("POST", "/v1/trajectories", other).status_code == 409
                assert client.ask("POST", "/v1/groups", beside).status_code == 409
                assert client.ask("GET", "/v1/trajectories/new").status_code == 404
            job = client.train(f"step-{number}", order(step))
            mean = statistics.fmean(run["reward"] for run in sent)
            assert job["result"]["metrics"]["reward_mean"] == pytest.approx(mean)
            key = {"Idempotency-Key": f"step-{number}"}
            assert client.ask("POST", "/v1/train", order(step[1:]), **key).status_code == 409
            for run in sent:
                kept = client.ok("GET", f"/v1/trajectories/{run['id']}")
                assert (kept["reward"], len(kept["turns"])) == (run["reward"], 1)

        stormy = StubServer(tmp_path / "stormy", settings=SETTINGS).start()
        seconds = iter(range(10**9))
        killer = Killer(stormy, draw, KILLS, 1.5, lambda: next(seconds))
        with FaultyProxy(stormy.port, draw.randrange(10**6)) as proxy:
            senders = [Patient(stormy, proxy.root) for _ in range(SENDERS)]

            def send(what: tuple[int, Any]) -> None:
                senders[what[0] % SENDERS].ok("POST", "/v1/groups", what[1])

            late: list[Any] = []
            killer.start()
            while killer.is_alive() or steps:
                step = steps.pop(0) if steps else []
                copies = [group for group in step for _ in range(draw.randint(0, 9))] + late
                late = [one for one in copies if draw.random() < 0.3] or draw.sample(groups, 5)
                now = [*step, *(one for one in copies if one not in late)]
                draw.shuffle(now)
                list(pool.map(send, enumerate(now)))
                number = (GROUPS - sum(map(len, steps)) - 1) // STEP
                times, body = draw.randint(1, 10), order(step or groups[-STEP:])
                ordered = partial(Patient.train, key=f"step-{number}", body=body)
                assert len({job["id"] for job in pool.map(ordered, senders[:times])}) == 1
        killer.join()
        stormy.kill()
        stormy.start()
        try:
            assert not killer.torn
            assert len(proxy.met) == len(FATES), proxy.met
            assert {len(versions) for versions in ledger(stormy).values()} == {1}
            assert ledger(stormy) == ledger(server)
            folders = [one.data_dir / "adapters" / "tiny" for one in (server, stormy)]
            for version in (folders[0]).iterdir():
                for file in ("adapter_model.safetensors", "optimizer.safetensors"):
                    mine, theirs = (folder / version.name / file for folder in folders)
                    assert mine.read_bytes() == theirs.read_bytes(), version
        finally:
            stormy.stop()


@pytest.mark.soak("T3", LATEST, "versions, each sampled from, 0 to as many late")
@pytest.mark.slow
def test_what_is_too_old_is_never_trained_and_counted(tmp_path: Path) -> None:
    with StubServer(tmp_path / "data", settings=SETTINGS) as server:
        _late(server)


def _late(server: StubServer) -> None:
    client = Patient(server)
    late: list[Any] = []
    for version in range(LATEST + 1):
        pairs: list[Any] = []
        for part in ("late", "now"):
            runs = [sampled(client, f"{part}-{version}-{i}") | {"reward": i} for i in range(2)]
            pairs.append({"id": f"{part}-{version}", "trajectories": runs})
            client.ok("POST", "/v1/groups", pairs[-1])
        late.append(pairs[0])
        if version < LATEST:
            client.train(f"to-{version + 1}", order(pairs[1:]))
    for lateness in range(1, LATEST + 1):
        for most in {0, lateness // 2, lateness - 1}:
            group = late[LATEST - lateness]
            body = order([group], FAR | {"max_staleness": most})
            result = client.train(f"late-{lateness}-{most}", body)["result"]
            assert (result["version"], result["excluded"]) == (LATEST, {"groups.stale": 1})
    most = LATEST // 2
    result = client.train("all", order(late, FAR | {"max_staleness": most}))["result"]
    assert result["version"] == LATEST + 1
    assert Counter(result["excluded"]) == Counter({"groups.stale": LATEST - most})
    assert result["metrics"]["staleness_max"] == most
    taken = {run for run, by in ledger(server).items() if by == [LATEST + 1]}
    assert taken == {f"late-{LATEST - n}-{i}" for n in range(most + 1) for i in range(2)}
