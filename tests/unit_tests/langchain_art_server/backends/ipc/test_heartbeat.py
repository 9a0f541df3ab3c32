"""When an engine's process is taken for dead: by its parent's ticks, not by a clock."""

import asyncio
import time

from langchain_art_server.backends.ipc.heartbeat import Heartbeat, LoopLag, watch_event_loop


def test_a_silent_process_is_ended_after_20_seconds_and_said_to_be_slow_before() -> None:
    heartbeat = Heartbeat(300)
    for tick in range(10):
        assert heartbeat.tick(ready=True, busy=False) is None
        assert (heartbeat.problem is None) == (tick < 2)
    assert heartbeat.problem == "its process has not answered for 20 s"
    assert heartbeat.tick(ready=True, busy=False) == "has not answered for 20 s"
    assert not heartbeat.hangs


def test_a_start_may_be_silent_for_five_minutes() -> None:
    heartbeat = Heartbeat(300)
    for _ in range(150):
        assert heartbeat.tick(ready=False, busy=True) is None
    assert heartbeat.tick(ready=False, busy=True) == "has not answered for 300 s"


async def test_a_busy_event_loop_is_seen() -> None:
    pauses = LoopLag()
    watch = asyncio.create_task(watch_event_loop(pauses))
    await asyncio.sleep(0.01)
    time.sleep(0.3)
    await asyncio.sleep(0.1)
    watch.cancel()
    assert 0.2 < pauses.seconds < 5
