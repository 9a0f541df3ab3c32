"""Slots are shared: who is alone has all of them, and nobody waits for one client alone."""

import pytest

from langchain_art.errors import InvalidRequest, Overloaded
from langchain_art.wire import KeyLimits
from langchain_art_server.gateway import limits
from langchain_art_server.gateway.limits import CallSlots, Lease, Meter


def refused(slots: CallSlots, client: str, count: int = 1) -> bool:
    try:
        slots.take(client, count).give_back(count)
    except Overloaded as error:
        assert error.retry_after == 1
        return True
    return False


def test_more_choices_than_there_are_slots_are_not_told_to_try_again() -> None:
    with pytest.raises(InvalidRequest, match=r"got 9 choices \(n\), .* max_running_calls is 8,"):
        CallSlots(8).take("a", 9)
    with pytest.raises(InvalidRequest, match=r"got 5 choices \(n\), .* concurrent_calls is 4,"):
        Meter(KeyLimits(concurrent_calls=4)).begin(5)


def test_who_has_all_of_them_shuts_nobody_out() -> None:
    slots = CallSlots(32)
    held = slots.take("a", 32)
    assert refused(slots, "a")
    with slots.take("b", 1), slots.take("c", 1):
        assert refused(slots, "d")
    held.give_back(32)
    assert slots.running == 0


def test_while_another_waits_a_client_gets_no_more_than_its_share() -> None:
    slots = CallSlots(8)
    greedy = [slots.take("a", 1) for _ in range(8)]
    assert refused(slots, "b")
    for lease in greedy[:3]:
        lease.give_back()
    assert refused(slots, "a")  # it has 5 of 8, and b waits
    with pytest.raises(Overloaded, match="5 of them are yours, and other clients wait"):
        slots.take("a", 1)
    with slots.take("b", 2):
        assert not refused(slots, "a")  # nobody else waits any more


def test_who_has_nothing_is_never_refused_for_its_share() -> None:
    slots = CallSlots(16)
    held = slots.take("a", 15)
    assert refused(slots, "b", 4)
    held.give_back(14)
    with slots.take("c", 15 - slots.running):
        pass


def test_who_does_not_come_back_does_not_hold_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_WAITS", -1.0)
    slots = CallSlots(4)
    held = slots.take("a", 4)
    assert refused(slots, "b")
    held.give_back(1)
    assert not refused(slots, "a")


def test_a_lease_gives_back_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = CallSlots(4)
    with pytest.raises(ZeroDivisionError), slots.take("a", 4) as lease:
        lease.give_back(3)
        assert isinstance(lease, Lease) and slots.running == 1
        raise ZeroDivisionError
    assert slots.running == 0 and not slots._of


def test_clients_are_known_by_their_calls_and_when_these_ended() -> None:
    slots = CallSlots(8)
    with slots.take("a", 2):
        with slots.take("b", 1):
            assert slots.clients() == [("a", 2, 0.0), ("b", 1, 0.0)]
        assert [one[:2] for one in slots.clients()] == [("a", 2), ("b", 0)]
    assert [one[:2] for one in slots.clients()] == [("a", 0), ("b", 0)]  # the latest first
    for number in range(1000):
        with slots.take(f"c{number}", 1):
            pass
    assert len(slots.clients()) == 256
