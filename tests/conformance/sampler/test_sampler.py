"""The embedded sampler: exact logprobs in mixed batches, reproducible and correct draws, limits."""

import queue
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from langchain_art.errors import ArtError, UnknownModel
from langchain_art_server.backends.embedded import process
from langchain_art_server.backends.embedded.prefix_cache import BLOCK
from langchain_art_server.backends.ipc.channel import EngineCall
from tests.support.tiny_models import (
    KINDS,
    WORST,
    LocalSampler,
    ask,
    check_logprobs,
    load_plain,
    save_model,
    teacher_logprobs,
    three_adapters,
    with_adapter,
)

LAYERS = 2
GROWING = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize("kind", [*KINDS, "growing"])
def test_logprobs_are_the_plain_models_in_ragged_staggered_batches(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    slotted = kind != "growing"
    if slotted:
        path = save_model(tmp_path / kind, kind)
    else:
        path = save_model(tmp_path / kind, "llama", rope_parameters=GROWING)
    sampler = LocalSampler(path)
    assert (sampler.host.scheduler._runner.cache is not None) == slotted
    assert ("one sequence at a time" in caplog.text) == (not slotted)
    calls = []
    for i in range(6 if slotted else 3):
        calls.append(sampler.send(ask("the team " * (7 * (i % 3)) + str(i), seed=i, max_tokens=24)))
        sampler.turn()
        sampler.turn()
    sampler.run()
    replies = [sampler.reply(call) for call in calls]
    assert len({len(reply.prompt_token_ids) for reply in replies}) >= 3
    # The plain model takes the gated delta rule by chunks, the sampler by tokens. On one CPU the
    # float32 of the first was 3e-5 from float64, of the second 6e-5: 9e-5 from one another.
    worst = 4 * WORST if kind == "qwen3_next" else WORST
    check_logprobs(load_plain(path), replies, worst=worst)


@pytest.fixture(scope="module")
def tuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return three_adapters(tmp_path_factory.mktemp("adapters"), model)


def test_base_and_adapters_share_a_batch_and_stay_apart(
    model: Path, tuned: dict[str, Path]
) -> None:
    sampler = LocalSampler(model)
    for name, path in tuned.items():
        sampler.load(name, path)
    names = [None, *tuned]
    calls = []
    for round_ in range(3):  # the later rounds find prefixes of the earlier ones, and siblings
        for name in names:
            text = "the weather in Paris is sunny " * 4 + "and the mail " * round_
            calls.append((name, sampler.send(ask(text, adapter=name, max_tokens=20))))
            sampler.turn()
    prefilled = sampler.host.scheduler.prefilled
    sampler.run()
    replies = [(name, sampler.reply(call)) for name, call in calls]
    check_logprobs(load_plain(model), [reply for name, reply in replies if name is None])
    distances = []
    for name, path in tuned.items():
        mine = [reply for other, reply in replies if other == name]
        check_logprobs(with_adapter(model, path), mine)
        base = teacher_logprobs(load_plain(model), mine[0])
        distances.append((base - torch.tensor(mine[0].logprobs)).abs().max())
    assert min(distances) > 0.05, "the adapters do something, so routing is what was tested"
    assert sampler.host._prefixes.hit_tokens > 0
    assert prefilled > 0


def test_a_tenants_prefixes_and_texts_serve_no_other(model: Path) -> None:
    sampler = LocalSampler(model)
    text = "the weather in Paris is sunny and the mail of Ann is on the table again"
    question, prefixes = ask(text, max_tokens=4, seed=1), sampler.host._prefixes

    def hits(tenant: str) -> int:
        before = prefixes.hit_tokens
        sampler.chat(replace(question, tenant=tenant))
        return prefixes.hit_tokens - before

    assert [hits(tenant) for tenant in ("", "ana", "bob")] == [0, 0, 0]
    again = [hits(tenant) for tenant in ("", "ana", "bob")]
    assert min(again) > 0 and len(set(again)) == 1
    [reply] = sampler.chat(replace(question, tenant="ana"))
    said = {"role": "assistant", "content": reply.content}
    later = [*question.messages, said, {"role": "user", "content": "and then?"}]
    kept = sampler.host._template._kept
    rendered = sampler.host._template.prompt(later, [], tenant="ana").text
    assert kept.beginnings(rendered, (), "ana") and not kept.beginnings(rendered, (), "carl")


def test_an_adapters_prefixes_never_serve_the_base_or_another_version(
    model: Path, tuned: dict[str, Path]
) -> None:
    sampler = LocalSampler(model)
    sampler.load("x@1", tuned["a@1"])
    question = ask("the weather in Paris is sunny and the mail of Ann", adapter="x@1")
    sampler.chat(question)
    sampler.unload("x@1")
    with pytest.raises(UnknownModel, match="x@1"):
        sampler.chat(question)
    sampler.load("x@1", tuned["b@1"])  # the same name again, with other weights
    before = sampler.host._prefixes.hit_tokens
    replies = sampler.chat(question, ask("the weather in Paris is sunny and the mail of Ann"))
    assert sampler.host._prefixes.hit_tokens == before
    check_logprobs(with_adapter(model, tuned["b@1"]), replies[:1])
    check_logprobs(load_plain(model), replies[1:])


def test_unloading_waits_for_running_calls(model: Path, tuned: dict[str, Path]) -> None:
    sampler = LocalSampler(model)
    sampler.load("a@1", tuned["a@1"])
    call = sampler.send(ask(adapter="a@1", max_tokens=30, seed=3))
    sampler.turn()
    assert call.id not in sampler.results
    sampler.unload("a@1")
    sampler.run()
    check_logprobs(with_adapter(model, tuned["a@1"]), [sampler.reply(call)])
    assert all(not layer.pairs for layer in sampler.host._bank._wrapped.values())


def test_eight_equal_prompts_are_prefilled_once(model: Path) -> None:
    sampler = LocalSampler(model)
    question = "the weather in Paris is sunny and the mail of Ann was sent on Monday " * 3
    replies = sampler.chat(*(ask(question, seed=i) for i in range(8)))
    length = len(replies[0].prompt_token_ids)
    assert sampler.host.scheduler.prefilled == length + 7  # each sibling computes its last token
    check_logprobs(load_plain(model), replies)


def test_a_seed_below_zero_is_not_the_one_above(model: Path) -> None:
    seeds = (-2, -1, 0, 1, 2)
    replies = LocalSampler(model).chat(*(ask("mail", seed=i, temperature=3.0) for i in seeds))
    assert len({tuple(one.token_ids) for one in replies}) == len(seeds)


def test_the_next_turn_computes_only_what_is_new(model: Path) -> None:
    sampler = LocalSampler(model)
    question = {"role": "user", "content": "the weather in Paris " * 5}
    replies = sampler.chat(*(ask(messages=[question], seed=i, max_tokens=40) for i in range(40)))
    first = next(r for r in replies if len(r.token_ids) > 20 and not {0, 1, 2} & {*r.token_ids})
    before = sampler.host.scheduler.prefilled
    more = [question, {"role": "assistant", "content": first.content}]
    (second,) = sampler.chat(ask(messages=[*more, {"role": "user", "content": "and"}], seed=2))
    known = len(first.prompt_token_ids) + len(first.token_ids)
    assert sampler.host.scheduler.prefilled - before <= len(second.prompt_token_ids) - known + 17
    check_logprobs(load_plain(model), [second])


def test_a_prompt_that_is_cached_whole_computes_its_last_token_again(model: Path) -> None:
    sampler = LocalSampler(model)
    asked = [ask("the team " * 20 + "y" * n, seed=n, max_tokens=4) for n in range(BLOCK)]
    lengths = [len(reply.prompt_token_ids) for reply in sampler.chat(*asked)]
    whole = asked[next(i for i, length in enumerate(lengths) if length % BLOCK == 0)]
    before = sampler.host.scheduler.prefilled
    replies = sampler.chat(whole)
    assert sampler.host.scheduler.prefilled - before == BLOCK, "of its last block"
    check_logprobs(load_plain(model), replies)


def test_a_small_kv_cache_makes_calls_wait_and_start_again_unharmed(model: Path) -> None:
    sampler = LocalSampler(model, max_model_len=256)
    cache = sampler.host.scheduler._runner.cache
    cache.max_cells = 400  # slots x positions
    requests = [ask("mail " * i, seed=i, max_tokens=120) for i in range(10)]
    replies = sampler.chat(*requests)
    assert sum(len(r.token_ids) + len(r.prompt_token_ids) for r in replies) > 1000
    assert sampler.host.scheduler.preempted > 0
    check_logprobs(load_plain(model), replies)
    roomy = LocalSampler(model).chat(*requests)
    assert [r.token_ids for r in roomy] == [r.token_ids for r in replies]


def test_few_calls_share_a_pass_over_prompts_with_those_that_come_next(model: Path) -> None:
    sampler = LocalSampler(model)
    calls = [sampler.send(ask(f"mail {i}", seed=i, max_tokens=60)) for i in range(40)]
    sampler.turn()
    sampler.turn()
    running = sampler.host.scheduler.counts[0]

    def added(count: int) -> int:
        calls.extend(sampler.send(ask(f"{len(calls)} team " * 3, seed=1)) for _ in range(count))
        sampler.turn()
        return sampler.host.scheduler.counts[1]

    assert running > 16
    assert added(1) == 0, "nothing was computed just before"
    assert added(1) == 1, "waits for one step"
    assert added(1) == 0, "and shares the pass of the next"
    assert added(running // 8 + 2) == 0, "many do not wait"
    sampler.run()
    check_logprobs(load_plain(model), [sampler.reply(call) for call in calls])


class Arrivals(queue.Queue[EngineCall]):
    """Whoever waits for a time gets the next of those that come later."""

    def __init__(self, calls: list[EngineCall]) -> None:
        super().__init__()
        self.later = calls

    def get(self, block: bool = True, timeout: float | None = None) -> EngineCall:
        if timeout and self.later:
            return self.later.pop(0)
        return super().get(block, timeout)

    def arrive(self, count: int) -> None:
        """So many of them are there at once."""
        for _ in range(count):
            self.put(self.later.pop(0))


def test_the_first_calls_of_many_wait_for_the_others_and_a_lone_one_does_not(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_GATHER_SECONDS", 60.0)  # to tokenise may take long here
    sampler = LocalSampler(model)
    calls = [sampler.send(ask(f"mail {i}", seed=i)) for i in range(12)]
    sent = [sampler.inbox.get() for _ in calls]
    sampler.inbox = Arrivals(sent)
    sampler.inbox.arrive(1)
    sampler.host._take()
    assert sampler.host.scheduler.counts == (0, 1)
    assert len(sampler.inbox.later) == 11, "a lone call does not wait"
    sampler.host.step()
    sampler.inbox.arrive(2)
    sampler.host._take()
    assert len(sampler.inbox.later) == 9, "nothing waits while rows run"
    while sampler.host.scheduler.busy:
        sampler.host.step()
    sampler.inbox.arrive(2)
    sampler.host._take()
    assert sampler.host.scheduler.counts == (0, 9) and not sampler.inbox.later
    sampler.run()
    check_logprobs(load_plain(model), [sampler.reply(call) for call in calls])


def test_weights_that_are_not_finite_fail_their_own_calls_only(
    model: Path, tuned: dict[str, Path]
) -> None:
    sampler = LocalSampler(model)
    sampler.load("a@1", tuned["a@1"])
    for layer in sampler.host._bank._wrapped.values():
        for _, up in layer.pairs.values():
            up.fill_(float("inf"))
    text = "the weather in Paris is sunny and the mail"
    good, bad = sampler.send(ask(text, seed=1)), sampler.send(ask(text, adapter="a@1"))
    sampler.run()
    with pytest.raises(ArtError, match="not finite"):
        sampler.reply(bad)
    tokens = sampler.reply(good).prompt_token_ids  # the same prompt, under the other root
    root = sampler.host._adapters["a@1"].root
    assert sampler.host._prefixes.match(root, tokens, len(tokens))[0] == []
    assert sampler.host._prefixes.match(0, tokens, len(tokens))[0] != []
    later = sampler.chat(*(ask(text, seed=i) for i in range(4)))
    check_logprobs(load_plain(model), [sampler.reply(good), *later])
