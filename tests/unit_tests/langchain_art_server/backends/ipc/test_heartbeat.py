"""When an engine's process is taken for dead: by its parent's ticks, not by a clock."""

from __future__ import annotations

from langchain_art_server.backends.ipc.heartbeat import Heartbeat


def test_a_silent_process_is_ended_after_20_seconds_and_said_to_be_slow_before() -> None:
    heartbeat = Heartbeat(300)
    for tick in range(10):
        assert heartbeat.tick(ready=True, busy=False) is None
        assert (heartbeat.problem is None) == (tick < 2)
    assert heartbeat.problem == "its process has not answered for 20 s"
    assert heartbeat.tick(ready=True, busy=False) == "has not answered for 20 s"
    assert not heartbeat.hangs


def test_an_answer_that_comes_late_counts() -> None:
    heartbeat = Heartbeat(300)
    for _ in range(50):
        for _ in range(9):
            assert heartbeat.tick(ready=True, busy=True) is None
        heartbeat.answered(0)
        assert heartbeat.problem is None
        heartbeat.answered(1)


def test_a_start_may_be_silent_for_five_minutes() -> None:
    heartbeat = Heartbeat(300)
    for _ in range(150):
        assert heartbeat.tick(ready=False, busy=True) is None
    assert heartbeat.tick(ready=False, busy=True) == "has not answered for 300 s"


def test_a_process_that_answers_and_makes_no_turn_for_its_calls_hangs() -> None:
    heartbeat = Heartbeat(6)
    for turns in range(9):  # it works
        heartbeat.answered(turns)
        assert heartbeat.tick(ready=True, busy=True) is None
    for _ in range(9):  # it has nothing to do
        heartbeat.answered(8)
        assert heartbeat.tick(ready=True, busy=False) is None
    for _ in range(3):
        heartbeat.answered(8)
        assert heartbeat.tick(ready=True, busy=True) is None
    heartbeat.answered(8)
    assert heartbeat.tick(ready=True, busy=True) == "did nothing for its calls for 6 s"
    assert heartbeat.hangs
