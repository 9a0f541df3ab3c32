"""A fit that was killed and goes on ends with the bits of one that was not."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from langchain_art.training.fit_state import read_records
from langchain_art.training.records import StepRecord
from tests.support import forked_start
from tests.support.live_server import REPO, ForkedServer
from tests.support.repeatable_fit import digests
from tests.support.soak import count

#: Fits that are killed, and how often each.
FITS, DEATHS = count(1, 20), count(1, 2)
IMPORTS = ("langchain_art.chat_models", "langchain_art.training.trainer")


def run(
    server: ForkedServer, folder: Path, draw: random.Random | None = None, most: int = 0
) -> tuple[list[Any], int]:
    """A fit of a new policy, killed `DEATHS` times after at most `most` events each.

    The server is killed once in each of the fit's processes.

    Returns:
        Scenarios and rewards of each step and evaluation, and the digests of each version; and the
        number of events.
    """
    folder.mkdir()
    out, events, log = folder / "fit", folder / "events", folder / "log"
    events.touch()
    for death in range(DEATHS if draw else 0, -1, -1):
        served = server.process
        assert served is not None
        kills, seen = dict[int, int](), events.stat().st_size
        if draw is not None:
            first, last = sorted(draw.sample(range(1, most + 1), 2))
            kills = {seen + first: served.pid} | ({seen + last: 0} if death else {})
        args = [server.base_url, folder.name, str(out), str(events), json.dumps([*kills.items()])]
        client = forked_start.start(
            "tests.support.repeatable_fit", args, os.environ, REPO, log, IMPORTS
        )
        while client.poll() is None:
            time.sleep(0.05)
            if served.poll() is not None and server.process is served:
                server.start()
        if draw is not None and server.process is served:  # the fit was killed just after it
            served.wait(60)
            server.start()
        assert client.poll() == (-signal.SIGKILL if death else 0), log.read_text()
    found: list[Any] = digests(server.data_dir, folder.name)
    for one in read_records(out / "history.jsonl"):
        if isinstance(one, StepRecord):
            found.append((one.step, one.reward_mean, one.drawn, one.resampled))
        else:
            found.append((one.kind, one.step, getattr(one, "mean", None)))
    return found, events.stat().st_size


@pytest.mark.soak("F9", FITS, f"fits, each killed {DEATHS} times, and its server once more")
@pytest.mark.slow
@pytest.mark.timeout(count(600, 14_400))
def test_a_killed_fit_ends_as_one_that_was_not(tmp_path: Path) -> None:
    with ForkedServer(tmp_path / "data") as server:
        calm, events = run(server, tmp_path / "calm")
        for number in range(FITS):
            draw, folder = random.Random(number), tmp_path / f"killed-{number}"
            killed, _ = run(server, folder, draw, events // 2)
            assert killed == calm
