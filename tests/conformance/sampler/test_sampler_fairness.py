"""Clients share the engine: what one sends costs another little, by a clock that counts tokens."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from langchain_art_server.backends.base import ChatReply
from langchain_art_server.backends.embedded import process
from langchain_art_server.backends.embedded.token_sampler import SequenceState
from langchain_art_server.backends.ipc.channel import EngineCall
from tests.support.soak import count
from tests.support.tiny_models import (
    LocalSampler,
    ask,
    check_logprobs,
    load_plain,
    save_model,
    three_adapters,
    with_adapter,
)

BATCH = 16


class Clock:
    """The engine's time, by the rows and tokens that it computes."""

    def __init__(self, sampler: LocalSampler, a_pass: float, a_token: float) -> None:
        self.now, self._a_pass, self._a_token = 0.0, a_pass, a_token
        runner = sampler.host.scheduler._runner
        runner.decode = self._counted(runner.decode, lambda tokens, *_: len(tokens))
        runner.prefill = self._counted(runner.prefill, lambda _f, _s, rows, *_: sum(map(len, rows)))
        shares = sampler.host.scheduler._shares
        shares._clock, shares._linear = lambda: self.now, a_token > 0

    def _counted(self, compute: Callable[..., Any], count: Callable[..., int]) -> Any:
        def timed(*args: Any) -> Any:
            self.now += self._a_pass + self._a_token * count(*args)
            return compute(*args)

        return timed


@pytest.fixture
def sampler(model: Path) -> LocalSampler:
    return LocalSampler(
        model, sampler={"threads": 1, "kv_cache_bytes": 64 << 20, "max_batch": BATCH}
    )


def flood(
    sampler: LocalSampler, calls: int, text: str = "the team", **options: Any
) -> list[EngineCall]:
    """Another client's calls, all at once."""
    asked = (ask(f"{n} {text}", **{"client": "a", "seed": n, **options}) for n in range(calls))
    return [sampler.send(one) for one in asked]


def innocent(sampler: LocalSampler, clock: Clock, calls: int = 8) -> list[float]:
    """The engine's time for each of an innocent client's calls, one after the other."""
    took = list[float]()
    for number in range(calls):
        begun = clock.now
        call = sampler.send(ask(f"{number} mail", client="b", seed=number, max_tokens=8))
        while call.id not in sampler.results:
            sampler.host.step()
            assert call.id not in sampler.errors
        took.append(clock.now - begun)
        sampler.turn()  # the client reads its answer and makes the next request
    return took


@pytest.mark.soak
def test_a_client_with_hundreds_of_long_calls_makes_another_wait_little(
    sampler: LocalSampler, model: Path
) -> None:
    clock = Clock(sampler, 0.002, 0.0005)
    quiet = max(innocent(sampler, clock))
    asked = [ask(f"{n} the team", client="a", seed=n, max_tokens=120) for n in range(count(40, 60))]
    hostile = [sampler.send(one) for one in asked]
    for _ in range(80):  # half a second: the other client may have left for good
        sampler.turn()
    begun, tokens = clock.now, sum(len(s.out) for s in sampler.host.scheduler._rows)
    waits = innocent(sampler, clock)
    assert max(waits) <= 3 * quiet, "it waited for its turn only"
    assert sampler.host.scheduler.preempted > 0, "the batch was full of the other's calls"
    still = sum(len(s.out) for s in sampler.host.scheduler._rows if s.client == "a")
    assert still - tokens > 0.3 * (clock.now - begun) / 0.001, "whose calls went on meanwhile"
    sampler.run()
    replies = [sampler.reply(call) for call in hostile][::6]
    check_logprobs(load_plain(model), replies)
    alone = LocalSampler(model).chat(*asked[::6])
    assert tokens_of(alone) == tokens_of(replies), "and got what they would have got alone"


def test_full_memory_makes_a_client_with_little_wait_little(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "head_dim": 32, "num_key_value_heads": 4}
    model = save_model(tmp_path / "model", **sizes)
    layout = LocalSampler(model).host.scheduler._runner.cache.layout
    room_of_five = 5 * 340 * layout.bytes_per_token(torch.float32)
    settings = {"threads": 1, "max_batch": 64, "kv_cache_bytes": room_of_five}
    sampler = LocalSampler(model, sampler=settings, max_model_len=340)
    clock, scheduler = Clock(sampler, 0.002, 1e-6), sampler.host.scheduler  # it counts passes
    quiet = max(innocent(sampler, clock))
    scheduler._eos = set()  # all replies are as long as they may be
    asked = [
        ask(f"{n} the team", client=f"a{n % 8}", seed=n, max_tokens=300 - n) for n in range(16)
    ]
    hostile = [sampler.send(one) for one in asked]
    for _ in range(100):
        sampler.turn()
    waits, sent_back = list[float](), list[int]()
    while not {call.id for call in hostile} <= sampler.results.keys():
        before = scheduler.preempted
        waits += innocent(sampler, clock, 1)
        sent_back.append(scheduler.preempted - before)
        for _ in range(10):
            sampler.turn()
    assert len(waits) > 50 and max(waits) <= 4 * quiet, (quiet, [round(w, 3) for w in waits])
    assert sum(sent_back) > 10, "memory was short"
    assert max(sent_back) <= 4, "a row that gives way does not come and go"
    check_logprobs(load_plain(model), [sampler.reply(call) for call in hostile][::6])


def test_a_client_that_has_turns_of_its_own_keeps_its_adapter(
    sampler: LocalSampler, model: Path, tmp_path: Path
) -> None:
    Clock(sampler, 0.002, 0.0005)
    paths = three_adapters(tmp_path, model)
    for name in ("a@1", "b@1"):
        sampler.load(name, paths[name])
    firsts, decode = set[int](), sampler.host.scheduler._decode

    def noted(first: int, last: int, ended: list[SequenceState]) -> None:
        firsts.add(first)
        decode(first, last, ended)

    sampler.host.scheduler._decode = noted
    flood(sampler, 12, adapter="a@1", max_tokens=40)
    for _ in range(10):
        sampler.turn()
    call = sampler.send(ask("mail", client="b", adapter="b@1", seed=1, max_tokens=8))
    sampler.run()
    assert max(firsts) > 0, "rows behind the first were computed without those before them"
    check_logprobs(with_adapter(model, paths["b@1"]), [sampler.reply(call)])


def test_long_prompts_of_one_client_make_another_wait_little(
    sampler: LocalSampler, model: Path
) -> None:
    clock = Clock(sampler, 0.002, 0.0005)
    quiet = max(innocent(sampler, clock))
    hostile = flood(sampler, 12, "the team " * 240)
    sampler.turn()
    assert max(innocent(sampler, clock, 4)) <= 3 * quiet + 256 * 0.0005
    sampler.run()
    check_logprobs(load_plain(model), [sampler.reply(call) for call in hostile[::4]])


def test_rows_share_every_step_where_a_step_takes_as_long_for_one(sampler: LocalSampler) -> None:
    clock = Clock(sampler, 0.02, 0.0)
    hostile = flood(sampler, 8, max_tokens=60)
    for _ in range(5):
        sampler.turn()
    waits = innocent(sampler, clock, 4)
    assert waits[-1] <= 0.02 * 10
    sampler.run()
    assert clock.now <= 0.02 * (60 + 30), "no step was spent on a part of the rows for long"
    assert all(len(sampler.reply(call).token_ids) <= 60 for call in hostile)


def test_a_client_that_has_less_is_admitted_first(sampler: LocalSampler) -> None:
    clock = Clock(sampler, 0.02, 0.0)
    calls = {
        client: [
            sampler.send(ask(f"{n}{client}", client=client, seed=n, max_tokens=30))
            for n in range(count)
        ]
        for client, count in {"a": 64, "b": 3, "c": 1}.items()
    }
    while not all(one.id in sampler.results for client in "bc" for one in calls[client]):
        sampler.host.step()
    assert clock.now <= 0.02 * 45, "all of theirs ran at once"
    sampler.run()


# --- work in one step ---------------------------------------------------------------------------


class Counted:
    """How often some functions were called, in the step that called them most."""

    def __init__(self, sampler: LocalSampler, **functions: tuple[Any, str]) -> None:
        self.most = dict.fromkeys(functions, 0)
        self._now = dict(self.most)
        for name, (owner, attribute) in functions.items():
            setattr(owner, attribute, self._count(name, getattr(owner, attribute)))
        step = sampler.host.step

        def counted() -> None:
            self._now = dict.fromkeys(self._now, 0)
            step()
            self.most = {name: max(most, self._now[name]) for name, most in self.most.items()}

        sampler.host.step = counted

    def _count(self, name: str, function: Callable[..., Any]) -> Any:
        def called(*args: Any) -> Any:
            self._now[name] += 1
            return function(*args)

        return called


@pytest.fixture
def large(model: Path) -> LocalSampler:
    return LocalSampler(model, sampler={"threads": 1, "kv_cache_bytes": 64 << 20, "max_batch": 64})


def test_a_step_begins_few_calls_of_a_client_with_many(large: LocalSampler) -> None:
    sampler, host = large, large.host
    clock = Clock(sampler, 0.002, 0.0005)
    innocent(sampler, clock, 1)
    runner = host.scheduler._runner
    flood(sampler, BATCH, max_tokens=120)
    sampler.turn()
    counted = Counted(sampler, begun=(host, "begin"), passes=(runner, "prefill"))
    for _ in range(40):
        sampler.send(ask("the same team and mail", client="a", max_tokens=9))
    flood(sampler, 40, "", max_tokens=9)
    flood(sampler, 80, "", temperature=1e-6)
    innocent(sampler, clock, 30)
    assert counted.most["begun"] <= 32
    assert counted.most["passes"] == 1
    sampler.run()
    assert len(sampler.errors) == 80 and len(sampler.results) == 111 + BATCH


def test_calls_that_are_cancelled_at_once_leave_in_several_steps(large: LocalSampler) -> None:
    sampler = large
    calls = flood(sampler, 100, max_tokens=120)
    for _ in range(40):
        sampler.turn()
    assert len(sampler.host.scheduler._rows) > 50
    counted = Counted(sampler, kept=(sampler.host.scheduler._shared, "keep"))
    for call in calls:
        call.cancelled = True
    sampler.run()
    assert 0 < counted.most["kept"] <= 20, "16, and what ends by itself"
    while sampler.host._ended:
        sampler.host.step()
    assert not sampler.errors, "nobody is told: nobody waits"
    assert not sampler.host._running


def test_long_answers_of_one_client_take_a_part_of_the_steps_of_another(
    sampler: LocalSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, host = Clock(sampler, 0.004, 0.0), sampler.host
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: clock.now))
    quiet, end = max(innocent(sampler, clock)), host._end

    def slow(chat: Any, sequence: SequenceState) -> None:
        end(chat, sequence)
        clock.now += 0.004 if sequence.client == "a" else 0.0

    monkeypatch.setattr(host, "_end", slow)
    flood(sampler, BATCH, max_tokens=4)
    begun = clock.now
    while not host._ended:
        begun = clock.now
        sampler.turn()
    assert clock.now - begun <= 0.02, "none was running, but another had asked"
    assert max(innocent(sampler, clock, 4)) <= 1.6 * quiet


def tokens_of(replies: list[ChatReply]) -> list[list[int]]:
    return [list(reply.token_ids) for reply in replies]
