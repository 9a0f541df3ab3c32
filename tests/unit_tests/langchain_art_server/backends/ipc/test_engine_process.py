"""Messages to an engine's process, its heartbeat, and requests that are refused for its deaths."""

import asyncio
import os
import socket
import struct
import sys
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.base import ChatReply, ChatRequest, Sampling
from langchain_art_server.backends.ipc import process_sampler
from langchain_art_server.backends.ipc.chat_codec import pack_reply, unpack_reply
from langchain_art_server.backends.ipc.fork_server import ForkedProcess, can_fork
from langchain_art_server.backends.ipc.heartbeat import Heartbeat, LoopLag, watch_event_loop
from langchain_art_server.backends.ipc.process_sampler import PoisonRequests

ids = st.lists(st.integers(0, 2**31 - 1))


@given(prompt=ids, said=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats())))
def test_a_reply_comes_back_bit_for_bit(prompt: list[int], said: list[tuple[int, float]]) -> None:
    reply = ChatReply(
        prompt_token_ids=prompt,
        token_ids=[token for token, _ in said],
        logprobs=[logprob for _, logprob in said],
        content="é\u2028",
        tool_calls=[{"id": "c"}],
        finish_reason="tool_calls",
        excluded_because="greedy",
        top_logprobs=[[(5, -0.5, "x"), (6, -1.0, "y")]],
        token_texts=["é"],
        drawn_from=bytes(range(256)),
    )
    back = unpack_reply(from_json(to_json(pack_reply(reply))))
    assert list(back.prompt_token_ids) == prompt
    assert list(back.token_ids) == reply.token_ids
    assert [struct.pack("d", p) for p in back.logprobs] == [
        struct.pack("d", p) for p in reply.logprobs
    ]
    numbers = {"prompt_token_ids": [], "token_ids": [], "logprobs": []}
    assert replace(back, **numbers) == replace(reply, **numbers)


@pytest.mark.skipif(not can_fork(), reason="no engine is forked on this system")
def test_threads_that_wait_are_told_the_end_that_another_one_saw() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            ours, server = socket.socketpair()
            process, found = ForkedProcess(ours), list[int]()
            waiting = [
                threading.Thread(target=lambda: found.append(process.wait()))  # noqa: B023
                for _ in range(4)
            ]
            for thread in waiting:
                thread.start()
            with server:
                server.sendall(b"%d\n" % os.getpid())
                server.sendall(b"-9\n")
            while process.poll() is None:
                pass
            for thread in waiting:
                thread.join(30)
            assert found == [-9] * 4
    finally:
        sys.setswitchinterval(before)


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


def test_a_pause_of_the_loop_is_kept_for_a_minute_and_forgotten_after_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
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


POISON = ChatRequest(id="a", messages=[{"role": "user", "content": "x"}], adapter="p@1")


def test_a_request_that_ran_beside_others_is_refused_only_when_they_are_cleared() -> None:
    suspects = PoisonRequests()
    for index in range(16):  # the choices of one request die one death
        suspects.add(replace(POISON, id=f"a:{index}"), 0)
    suspects.check(POISON)
    suspects = PoisonRequests()
    others = [replace(POISON, sampling=Sampling(seed=index)) for index in range(4)]
    for death in (1, 2, 3):
        for request in (POISON, *others):
            suspects.add(replace(request, id=f"{death}", adapter=f"p@{death}"), death)
    for request in (POISON, *others):  # any of them may be the one
        assert suspects.check(request)
    for request in others:
        suspects.answered(request)
    with pytest.raises(InvalidRequest, match="ended 3 times"):
        suspects.check(POISON)
    assert not suspects.check(others[0])


def test_suspects_are_few_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_sampler, "_MAX_KNOWN", 3)
    suspects = PoisonRequests()
    for death in range(8):
        suspects.add(POISON, death)
    assert len(suspects._deaths) == 3
    monkeypatch.setattr(process_sampler, "_REMEMBERED", -1.0)
    assert not suspects
    assert not suspects._deaths
