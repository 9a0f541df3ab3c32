"""The limits of a key against a naive count, by a clock that the test holds."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.errors import InvalidRequest, Overloaded, RateLimitExceeded
from langchain_art.wire import KeyLimits
from langchain_art_server.gateway import limits
from langchain_art_server.gateway.limits import CallSlots, Meter, duration


def meter(**limits: int) -> tuple[Meter, SimpleNamespace]:
    clock = SimpleNamespace(now=1000.0)
    return Meter(KeyLimits(**limits), lambda: clock.now), clock


def headers(one: Meter) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in one.headers()}


def test_calls_of_a_minute_come_back_evenly() -> None:
    mine, clock = meter(calls_per_minute=6)
    for _ in range(6):
        with mine.begin(1):
            pass
    for seconds, wait in ((0.0, 10), (4.0, 6), (5.5, 5)):
        clock.now = 1000.0 + seconds
        with pytest.raises(RateLimitExceeded, match="calls_per_minute") as refused:
            mine.begin(1)
        assert refused.value.retry_after == wait
        assert isinstance(refused.value, Overloaded)  # which clients wait and retry for
    clock.now = 1010.0
    mine.begin(1)
    with pytest.raises(RateLimitExceeded):
        mine.begin(1)
    clock.now = 1070.0
    assert headers(mine) == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "6",
        "x-ratelimit-reset-requests": "0ms",
    }
    mine.begin(100)  # more than a minute has is let in when nothing was taken, and made up for
    clock.now += 959  # 96 at one in ten seconds, and not quite
    with pytest.raises(RateLimitExceeded):
        mine.begin(2)
    clock.now += 1
    mine.begin(2)


@given(
    limit=st.integers(1, 50),
    steps=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 4)), max_size=60),
)
def test_no_time_has_more_calls_than_a_minutes_and_what_came_back(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    """Against all begun calls, counted naively: at most the bucket and what has come back."""
    mine, clock = meter(calls_per_minute=limit)
    begun: list[tuple[float, int]] = []
    for pause, calls in steps:
        clock.now += pause
        try:
            mine.begin(calls)
        except RateLimitExceeded as refused:
            assert refused.retry_after is not None and refused.retry_after >= 1
            assert begun  # never the first
        else:
            begun.append((clock.now, calls))
        for since, _ in begun:
            count = sum(calls for at, calls in begun if at >= since)
            last = begun[-1][1]  # may have been let in with more than a minute has
            assert count <= limit + (clock.now - since) * limit / 60 + max(0, last - limit) + 1e-6


def test_tokens_are_counted_when_a_call_ends_and_a_debt_is_waited_for() -> None:
    mine, clock = meter(tokens_per_minute=600)
    with mine.begin(1), mine.begin(1):
        mine.count_tokens(500)
        mine.count_tokens(400)
    assert headers(mine)["x-ratelimit-remaining-tokens"] == "0"
    assert headers(mine)["x-ratelimit-reset-tokens"] == "1m30s"
    with pytest.raises(RateLimitExceeded, match="tokens_per_minute") as refused:
        mine.begin(1)
    assert refused.value.retry_after == 31  # 301 tokens at 10 a second
    clock.now += 30.2
    mine.begin(1)


def test_calls_at_once_are_counted_to_their_end() -> None:
    mine, _ = meter(concurrent_calls=3)
    with mine.begin(2):
        with pytest.raises(RateLimitExceeded, match="concurrent_calls"):
            mine.begin(2)
        with mine.begin(1), pytest.raises(RateLimitExceeded):
            mine.begin(1)
    with pytest.raises(ZeroDivisionError), mine.begin(3):
        raise ZeroDivisionError
    mine.begin(3)
    assert headers(mine) == {}


def test_a_refused_call_takes_nothing() -> None:
    mine, _ = meter(calls_per_minute=5, concurrent_calls=1, tokens_per_minute=10)
    with mine.begin(1):
        for _ in range(10):
            with pytest.raises(RateLimitExceeded):
                mine.begin(1)
    assert headers(mine)["x-ratelimit-remaining-requests"] == "4"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.1201, "121ms"), (1.0, "1s"), (59.2, "1m0s"), (360, "6m0s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


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
