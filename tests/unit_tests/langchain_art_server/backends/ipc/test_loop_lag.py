import asyncio
import time

import pytest

from langchain_art_server.backends.ipc import heartbeat
from langchain_art_server.backends.ipc.heartbeat import LoopLag, watch_event_loop


def test_it_is_kept_for_a_minute_and_forgotten_after_two(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    pauses = LoopLag()
    assert pauses.seconds == 0.0
    pauses.add(2.0)
    pauses.add(1.0)
    clock[0] += 61
    assert pauses.seconds == 2.0
    pauses.add(0.5)
    clock[0] += 60
    assert pauses.seconds == 0.5
    clock[0] += 600
    assert pauses.seconds == 0.0


async def test_a_busy_event_loop_is_seen() -> None:
    pauses = LoopLag()
    watch = asyncio.create_task(watch_event_loop(pauses))
    await asyncio.sleep(0.01)
    time.sleep(0.3)
    await asyncio.sleep(0.1)
    watch.cancel()
    assert 0.2 < pauses.seconds < 5
