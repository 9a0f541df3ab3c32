"""What is sent again and again, torn, late or changed: trained once, as it was first sent.

The engines compute nothing (`tests.support.stub_engines`): a version's weights are the digest of
its parent's and of the rows, so that they are equal only if all that was trained is.
"""

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json

from tests.support.faulty_proxy import FATES, FaultyProxy
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.storms import Killer, Patient
from tests.support.stub_engines import StubServer

GROUPS, KILLS = count(20, 500), count(2, 50)
#: Groups of a step, runs of a group, and clients that send at once.
STEP, RUNS, SENDERS = 10, 4, 16
SETTINGS = "keep_checkpoints = 1000\n"
FAR = {"max_staleness": None, "learning_rate": 1e-4}


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


def order(groups: list[Any]) -> dict[str, Any]:
    ids = [[run["id"] for run in group["trajectories"]] for group in groups]
    return {"policy": "tiny", "groups": ids, "config": FAR}


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
            for change in ({"reward": 1000.0}, {"turns": []}, {"scenario": "s"}):
                other = step[0]["trajectories"][0] | change
                beside = {"id": "new", "trajectories": [{"id": "new"}, other]}
                assert client.ask("POST", "/v1/trajectories", other).status_code == 409
                assert client.ask("POST", "/v1/groups", beside).status_code == 409
                assert client.ask("GET", "/v1/trajectories/new").status_code == 404
            client.train(f"step-{number}", order(step))

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
