"""The next one is of the client that has least; clients that have as much take turns."""

from __future__ import annotations

from collections import Counter

from langchain_art_server.backends.chat.fair_queue import FairQueue


def queue_of(**counts: int) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for client, count in counts.items():
        for number in range(count):
            queue.put(client, f"{client}{number}")
    return queue


def taken(queue: FairQueue[str], held: Counter[str], count: int) -> list[str]:
    found: list[str] = []
    for _ in range(count):
        one = queue.take(held)
        assert one is not None
        held[one[0]] += 1
        found.append(one)
    return found


def test_a_client_with_hundreds_delays_another_by_one() -> None:
    assert taken(queue_of(a=300, b=2), Counter(a=50), 4) == ["b0", "b1", "a0", "a1"]
    assert taken(queue_of(a=300, b=2), Counter(), 4) == ["a0", "b0", "a1", "b1"]


def test_clients_that_hold_nothing_take_turns() -> None:
    queue = queue_of(a=3, b=2, c=1)
    assert [queue.take({}) for _ in range(6)] == ["a0", "b0", "c0", "a1", "b1", "a2"]
    assert not queue
    assert queue.take({}) is None


def test_what_is_put_back_is_next() -> None:
    queue = queue_of(a=2, b=2)
    assert queue.take({}) == "a0"
    queue.put_back("a", "a0")
    assert [queue.take({}) for _ in range(4)] == ["a0", "b0", "a1", "b1"]


def test_only_some_clients_are_asked_for() -> None:
    queue = queue_of(a=1, b=1)
    assert queue.take({}, {"b", "c"}) == "b0"
    assert queue.take({}, {"b", "c"}) is None
    assert queue.clients == {"a"}


def test_what_is_unwanted_is_dropped() -> None:
    queue = queue_of(a=3, b=1, c=2)
    assert queue.drop(lambda one: one in {"a1", "b0", "c0", "c1"}) == ["a1", "b0", "c0", "c1"]
    assert queue.clients == {"a"}
    assert [queue.take({}), queue.take({})] == ["a0", "a2"]
