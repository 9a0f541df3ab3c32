"""vLLM as the sampler: exact tokens and logprobs, the embedded sampler's words, nothing lost."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from langchain_art.errors import ArtError, ConfigError, InvalidRequest, PromptTooLong, UnknownModel
from langchain_art_server.algorithms.sequences.token_sets import single, unpack
from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest
from langchain_art_server.backends.ipc.worker import WorkerDied
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.vllm.sampler import VllmSampler
from tests.support.learner_cases import gaps
from tests.support.tiny_models import (
    CLOCK,
    WEATHER,
    LocalSampler,
    ask,
    check_logprobs,
    load_plain,
    save_adapter,
    with_adapter,
)
from tests.support.vllm_engine import (
    alive,
    command,
    gone,
    guard_of,
    shared_memory,
    vllm_of,
)
from tests.support.vllm_sampling import OF_THE_SAMPLER, chat, pid_of

#: Most times that vLLM's engine is stopped, or what holds it killed, until a stream was cut.
TRIES = 4

pytestmark = OF_THE_SAMPLER


@pytest.fixture(scope="session")
def model(vllm_model: Path) -> Path:
    return vllm_model


@pytest.fixture(scope="session")
def adapters(vllm_adapters: dict[str, Path]) -> dict[str, Path]:
    return vllm_adapters


@pytest.fixture(scope="session")
def sampler(vllm_sampler: VllmSampler) -> VllmSampler:
    return vllm_sampler


@pytest.fixture(scope="module")
def embedded(model: Path) -> LocalSampler:
    """What the other engine says of the same requests."""
    return LocalSampler(model)


async def test_mixed_batches_of_every_kind_have_the_plain_models_logprobs(
    sampler: VllmSampler, model: Path, adapters: dict[str, Path]
) -> None:
    assert (sampler.info.device, sampler.info.dtype) == ("cpu", "float32")
    assert (sampler.info.max_model_len, sampler.info.vocab_size) == (1024, 344)
    names = [None, *adapters]
    requests = [
        ask(
            "the weather in Paris " * (i % 7) + str(i),
            adapter=names[i % 4],
            stream=i % 3 == 0,
            seed=2**70 + i if i % 2 else None,
            max_tokens=24,
            temperature=0.7 if i % 5 == 0 else 1.0,
        )
        for i in range(32)
    ]
    replies = await asyncio.gather(*(chat(sampler, request) for request in requests))
    for name in names:
        plain = load_plain(model) if name is None else with_adapter(model, adapters[name])
        for heat in (0.7, 1.0):
            mine = [
                reply
                for request, reply in zip(requests, replies, strict=True)
                if (request.adapter, request.sampling.temperature) == (name, heat)
            ]
            assert mine and not any(reply.excluded_because for reply in mine)
            check_logprobs(plain, mine, heat)


async def test_the_base_stays_the_base_when_adapters_have_filled_all_slots(
    sampler: VllmSampler, model: Path, tmp_path: Path
) -> None:
    names = [f"filler@{number}" for number in range(8)]  # more than `max_loras`
    for number, name in enumerate(names):
        await sampler.load_adapter(name, save_adapter(tmp_path / f"f{number}", model, 40 + number))
    requests = [
        ask(f"hello {number}", adapter=name, max_tokens=24)
        for number in range(4)
        for name in (None, *names)
    ]
    replies = await asyncio.gather(*(chat(sampler, request) for request in requests))
    base = [r for r, request in zip(replies, requests, strict=True) if request.adapter is None]
    check_logprobs(load_plain(model), base)
    for name in names:
        await sampler.unload_adapter(name)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"top_k": 3},
        {"tools": [WEATHER, CLOCK]},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER, CLOCK], "tool_choice": {"function": {"name": "clock"}}},
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": WEATHER["function"]["parameters"]},
            }
        },
        {"stop": ("e",)},
        {"top_logprobs": 3},
    ],
    ids=lambda options: " ".join(map(str, options)) or "plain",
)
async def test_a_reply_says_what_the_embedded_sampler_would(
    sampler: VllmSampler, embedded: LocalSampler, options: dict[str, Any]
) -> None:
    request = ask("mail of Ann", seed=3, max_tokens=200, **options)
    reply, (other,) = await chat(sampler, request), embedded.chat(request)
    streamed = await chat(sampler, replace(request, stream=True, id="streamed"))
    assert (streamed.token_ids, streamed.content) == (reply.token_ids, reply.content)
    assert reply.prompt_token_ids == other.prompt_token_ids
    if options.keys() & {"top_p", "top_k"}:
        assert other.excluded_because is None
        assert (reply.excluded_because or "").startswith("truncated sampling: top_")
    else:  # whether a choice was left depends on what each drew before
        why = [one.excluded_because for one in (reply, other)]
        assert len({None if (one or "").startswith("no choice") else one for one in why}) == 1
    assert len(reply.token_ids) == len(reply.logprobs) == len(reply.token_texts)
    assert bool(reply.tool_calls) == bool(other.tool_calls)
    if reply.tool_calls:
        names = [{call["function"]["name"] for call in one.tool_calls} for one in (reply, other)]
        assert names[0] <= {"weather", "clock"} and len(names[1]) == 1
        assert reply.finish_reason == other.finish_reason == "tool_calls"
    if stops := request.sampling.stop:
        text = "".join(reply.token_texts)
        assert stops[0] in text and stops[0] not in (reply.content or "")
        assert stops[0] not in "".join(reply.token_texts[:-1])
        assert reply.finish_reason == other.finish_reason == "stop"
    if most := request.sampling.top_logprobs:
        for found, token, value in zip(
            reply.top_logprobs, reply.token_ids, reply.logprobs, strict=True
        ):
            assert len(found) == most
            assert [one[1] for one in found] == sorted((one[1] for one in found), reverse=True)
            assert {one[0]: one[1] for one in found}.get(token, value) == value
        first, seen = reply.top_logprobs[0], other.top_logprobs[0]
        assert [one[0] for one in first] == [one[0] for one in seen]
        assert [one[1] for one in first] == pytest.approx([one[1] for one in seen], abs=1e-5)
    if request.sampling.temperature == 0.0:
        assert reply.token_ids == other.token_ids
        assert reply.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("heat", [1.0, 0.6])
async def test_the_learner_renormalises_over_what_a_grammar_allowed(
    sampler: VllmSampler, model: Path, adapters: dict[str, Path], heat: float
) -> None:
    schema = WEATHER["function"]["parameters"]
    kinds: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"tools": [WEATHER, CLOCK], "tool_choice": "required"},
    ]
    name, adapter = next(iter(adapters.items()))
    requests = [
        ask(
            "mail",
            adapter=name,
            seed=seed,
            temperature=heat,
            max_tokens=80,
            stream=seed > 2,
            **kind,
        )
        for seed in range(5)
        for kind in kinds
    ]
    replies = await asyncio.gather(*(chat(sampler, request) for request in requests))
    assert {reply.excluded_because for reply in replies} == {None}
    found = gaps(LearnerCore(str(model), "cpu", "float32"), adapter, replies, heat)
    gap = f"vLLM and learner: max {found.max():.2e}, mean {found.mean():.2e} nats"
    logging.getLogger(__name__).warning(gap)
    assert found.max() <= 1e-5
    for reply in replies:
        sets = unpack(reply.drawn_from)
        assert len(sets) == len(reply.token_ids)
        assert any(one == single(token) for one, token in zip(sets, reply.token_ids, strict=True))
        assert min(reply.logprobs) < -0.1  # and some were chosen


async def test_a_later_prompt_holds_the_very_tokens_that_were_sampled(sampler: VllmSampler) -> None:
    messages = [{"role": "user", "content": "mail"}]
    shown: list[int] = []
    for turn in range(4):
        reply = await chat(sampler, ask(messages=messages, seed=turn, max_tokens=40))
        assert reply.prompt_token_ids[: len(shown)] == shown
        if reply.finish_reason == "stop" and reply.token_ids[-1] == 2:
            shown = reply.prompt_token_ids + reply.token_ids
        messages = [*messages, {"role": "assistant", "content": reply.content}]
        messages.append({"role": "user", "content": f"and {turn}"})


@pytest.mark.parametrize(
    ("request_", "kind", "words"),
    [
        (ask("mail " * 1200), PromptTooLong, "the context of 1024"),
        (ask(adapter="d@1"), UnknownModel, "'d@1'"),
        (ask(temperature=0.005), InvalidRequest, "at least 0.01"),
    ],
    ids=["long", "unknown", "cold"],
)
async def test_what_can_not_be_answered_is_refused_by_name(
    sampler: VllmSampler, request_: ChatRequest, kind: type[ArtError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        await chat(sampler, request_)


def http_of(sampler: VllmSampler) -> httpx.AsyncClient:
    """vLLM's own interface."""
    socket = Path(command(guard_of(pid_of(sampler)))[3]) / "vllm.sock"
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    return httpx.AsyncClient(transport=transport, base_url="http://vllm")


async def test_closing_replies_early_aborts_them_in_vllm(sampler: VllmSampler) -> None:
    async with http_of(sampler) as http:

        async def running() -> float:
            lines = (await http.get("/metrics")).text.splitlines()
            found = [line for line in lines if line.startswith("vllm:num_requests_running")]
            return float(found[0].split()[-1])

        endless = {"max_tokens": None, "stop": ("never said",)}
        streams = [sampler.chat(ask(stream=True, seed=i, **endless)) for i in range(3)]
        for stream in streams:
            assert isinstance(await anext(stream), ChatDelta)
        waiting = asyncio.create_task(chat(sampler, ask(seed=9, **endless)))
        await asyncio.sleep(0.05)
        for stream in streams:
            await stream.aclose()
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        for _ in range(1000):
            if await running() == 0:
                break
            await asyncio.sleep(0.05)
        assert await running() == 0
    assert not sampler._pending


async def test_cancelled_loads_and_calls_leave_nothing_and_their_name_is_free(
    sampler: VllmSampler, adapters: dict[str, Path]
) -> None:
    folder = Path(command(guard_of(pid_of(sampler)))[3])
    async with http_of(sampler) as http:

        async def held() -> tuple[int, int]:
            models = (await http.get("/v1/models")).json()["data"]
            return len(models), len(list(folder.glob("adapter-*")))

        before = await held()
        for number in range(12):  # while it is copied, and while vLLM loads it
            load = asyncio.create_task(sampler.load_adapter("p@1", adapters["b@1"]))
            await asyncio.sleep(0.01 * number)
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            await sampler.unload_adapter("p@1")
            await sampler.load_adapter("p@1", adapters["a@1"])
            await sampler.unload_adapter("p@1")
        await sampler.load_adapter("p@1", adapters["a@1"])
        call = asyncio.create_task(chat(sampler, ask(adapter="p@1", seed=1, max_tokens=900)))
        await asyncio.sleep(0.05)
        await sampler.unload_adapter("p@1")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        for _ in range(200):
            if await held() == before:
                break
            await asyncio.sleep(0.05)
        assert await held() == before


async def test_an_adapters_directory_may_go_and_a_fresh_one_is_the_base(
    sampler: VllmSampler, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("mine", "fresh"):
        shutil.copytree(adapters["a@1"], tmp_path / name)
    tensors = load_file(tmp_path / "fresh" / "adapter_model.safetensors")
    for key, tensor in tensors.items():
        if "lora_B" in key:
            tensor.zero_()
    save_file(tensors, tmp_path / "fresh" / "adapter_model.safetensors")
    await sampler.load_adapter("fresh@0", tmp_path / "fresh")
    check_logprobs(load_plain(model), [await chat(sampler, ask(adapter="fresh@0"))])
    await sampler.load_adapter("mine@1", tmp_path / "mine")
    with pytest.raises(ConfigError, match="used once"):
        await sampler.load_adapter("mine@1", adapters["b@1"])
    shutil.rmtree(tmp_path / "mine")
    for number in range(40):  # so many that vLLM pushes the first ones out
        await sampler.load_adapter(f"other@{number}", adapters["b@1"])
    gone_by_now = await chat(sampler, ask("mail", adapter="mine@1", seed=2))
    check_logprobs(with_adapter(model, adapters["a@1"]), [gone_by_now])
    for name in ("mine@1", "fresh@0", *(f"other@{number}" for number in range(40))):
        await sampler.unload_adapter(name)
    folder = Path(command(guard_of(pid_of(sampler)))[3])
    assert len(list(folder.glob("adapter-*"))) == len(adapters)


async def test_unloading_waits_for_running_calls_and_the_name_gets_new_weights(
    sampler: VllmSampler, model: Path, adapters: dict[str, Path]
) -> None:
    question = "the weather in Paris is sunny and the mail of Ann"
    await sampler.load_adapter("x@1", adapters["a@1"])
    calls = [
        asyncio.create_task(chat(sampler, ask(question, adapter="x@1", seed=i, max_tokens=300)))
        for i in range(8)
    ]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert not all(call.done() for call in calls)
    await sampler.unload_adapter("x@1")
    with pytest.raises(UnknownModel, match="x@1"):
        await chat(sampler, ask(adapter="x@1"))
    await sampler.load_adapter("x@1", adapters["b@1"])
    after = await chat(sampler, ask(question, adapter="x@1", seed=1, max_tokens=30))
    check_logprobs(with_adapter(model, adapters["b@1"]), [after])
    check_logprobs(with_adapter(model, adapters["a@1"]), list(await asyncio.gather(*calls)))
    await sampler.unload_adapter("x@1")


async def test_it_sleeps_and_wakes_with_its_adapters(
    sampler: VllmSampler, model: Path, adapters: dict[str, Path]
) -> None:
    request = ask("Paris", adapter="a@1", seed=3, max_tokens=24)
    before = await chat(sampler, request)
    await sampler.sleep()
    early = asyncio.create_task(chat(sampler, request))  # what the gate keeps away, waits here
    await asyncio.sleep(1)
    assert not early.done()
    await sampler.wake()
    for reply in (await early, await chat(sampler, request)):
        assert reply.token_ids == before.token_ids
        check_logprobs(with_adapter(model, adapters["a@1"]), [reply])
    await sampler.wake()  # as after a restart in its sleep
    check_logprobs(load_plain(model), [await chat(sampler, ask("Paris", max_tokens=24))])


async def test_an_engine_or_a_host_that_is_killed_or_hangs_is_told_to_every_call(
    sampler: VllmSampler, model: Path, adapters: dict[str, Path]
) -> None:
    """Its engine is killed, then stopped, then the process that holds it is killed."""
    before, kills = await chat(sampler, ask(adapter="a@1", seed=5)), 0
    restarts = sampler.restarts
    tried = [ask(seed=seed, max_tokens=900, stop=("never said",)) for seed in range(32)]
    lengths = [len(r.token_ids) for r in await asyncio.gather(*(chat(sampler, r) for r in tried))]
    long, twin = tried[lengths.index(max(lengths))], with_adapter(model, adapters["a@1"])
    for victim in ("engine", "hung engine", "host"):
        cut = False
        for _ in range(TRIES):  # on a busy machine all may have been said before it is killed
            kills += 1
            cut = await cut_by_a_kill(sampler, victim, replace(long, id=f"{kills}"), twin)
            assert sampler.restarts == restarts + kills
            if cut:
                break
        assert cut, f"{TRIES} streams of {max(lengths)} tokens ended before the {victim} did"
    after = await chat(sampler, ask(adapter="a@1", seed=5))
    assert after.token_ids == before.token_ids


async def cut_by_a_kill(sampler: VllmSampler, victim: str, long: ChatRequest, twin: Any) -> bool:
    """Stop or kill it while it answers; whether a stream and one of eight calls were cut."""
    held = [guard_of(pid_of(sampler)), *vllm_of(pid_of(sampler))]
    shared, restarts = shared_memory(held), sampler.restarts
    asked = [ask(f"{i}", adapter="a@1", seed=i, max_tokens=900) for i in range(8)]
    calls = [asyncio.create_task(chat(sampler, one)) for one in asked]
    stream = sampler.chat(replace(long, stream=True))
    assert isinstance(await anext(stream), ChatDelta)
    how = signal.SIGSTOP if victim == "hung engine" else signal.SIGKILL
    os.kill(pid_of(sampler) if victim == "host" else held[-1], how)
    cut = False
    try:
        async for _ in stream:
            pass
    except WorkerDied:  # its first half is out; only the caller can begin anew
        cut = True
    assert gone(held)
    assert shared and not any(path.exists() for path in shared)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    said = [reply for reply in outcomes if isinstance(reply, ChatReply)]  # before the kill
    assert all(isinstance(died, WorkerDied) for died in outcomes if died not in said)
    # What is asked of the one that ends is not answered, either.
    while sampler.restarts == restarts:
        await asyncio.sleep(0.05)
    check_logprobs(twin, [*said, await chat(sampler, ask("again", adapter="a@1", seed=3))])
    assert not any(map(alive, held))
    return cut and len(said) < len(calls)
