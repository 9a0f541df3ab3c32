"""The sampler as the server uses it: a process of its own that may be killed at any time."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from langchain_art.errors import ConfigError, EngineUnavailable, InvalidRequest, UnknownModel
from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.backends.ipc.worker import WorkerDied
from langchain_art_server.config import Settings
from tests.support.tiny_models import (
    ask,
    check_logprobs,
    load_plain,
    save_adapter,
    with_adapter,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
LAYERS = 3  # calls that run when the engine is killed must not have ended by then


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapters") / "a", model, 1)


def settings(model: Path) -> Settings:
    return Settings.model_validate({"model": str(model), "sampler": {"threads": 1}})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampler(model: Path) -> AsyncIterator[TransformersSampler]:
    """One for all tests, in one event loop; they unload what they load."""
    made = TransformersSampler(settings(model))
    await made.start()
    yield made
    await made.close()


async def chat(sampler: TransformersSampler, request: ChatRequest) -> ChatReply:
    items = [item async for item in sampler.chat(request)]
    assert isinstance(items[-1], ChatReply)
    assert all(isinstance(item, ChatDelta) for item in items[:-1])
    if request.stream:
        text = "".join(item.content for item in items[:-1] if isinstance(item, ChatDelta))
        assert text == items[-1].content
        assert len(items) > 2
    else:
        assert len(items) == 1
    return items[-1]


async def retried(sampler: TransformersSampler, request: ChatRequest) -> ChatReply:
    """As a client does that hears that the engine ended during its call."""
    try:
        return await chat(sampler, request)
    except WorkerDied:
        return await chat(sampler, request)


async def test_calls_of_every_kind_at_once(
    sampler: TransformersSampler, model: Path, adapter: Path
) -> None:
    assert (sampler.info.name, sampler.info.device) == (model.name, "cpu")
    assert (sampler.info.max_model_len, sampler.info.vocab_size) == (1024, 344)
    await sampler.load_adapter("a@1", adapter)
    await sampler.load_adapter("a@1", adapter)
    requests = [
        ask(f"mail {i}", adapter="a@1" if i % 2 else None, stream=i % 3 == 0, seed=i, max_tokens=20)
        for i in range(12)
    ]
    refused = [chat(sampler, ask(adapter="b@1")), chat(sampler, ask(messages=[{"role": "alien"}]))]
    *replies, unknown, invalid = await asyncio.gather(
        *(chat(sampler, request) for request in requests), *refused, return_exceptions=True
    )
    assert isinstance(unknown, UnknownModel)
    assert isinstance(invalid, InvalidRequest)
    check_logprobs(load_plain(model), replies[::2])
    check_logprobs(with_adapter(model, adapter), replies[1::2])
    with_top = await chat(sampler, ask(seed=1, top_logprobs=2))
    assert isinstance(with_top.top_logprobs[0][0], tuple)
    await sampler.unload_adapter("a@1")
    with pytest.raises(UnknownModel, match="a@1"):
        await chat(sampler, ask(adapter="a@1"))


async def test_an_adapter_that_is_loaded_may_be_moved(
    sampler: TransformersSampler, model: Path, adapter: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapter, tmp_path / "staged")
    shutil.copytree(adapter, tmp_path / "other")
    await sampler.load_adapter("moved@1", tmp_path / "staged", probe=False)
    (tmp_path / "staged").rename(tmp_path / "published")
    await sampler.load_adapter("moved@1", tmp_path / "published")
    with pytest.raises(ConfigError, match="A name is used once"):
        await sampler.load_adapter("moved@1", tmp_path / "other")
    assert sampler.pid
    os.kill(sampler.pid, signal.SIGKILL)
    reply = await retried(sampler, ask(adapter="moved@1", seed=1, max_tokens=20))
    check_logprobs(with_adapter(model, adapter), [reply])
    await sampler.unload_adapter("moved@1")


async def test_kill_9_while_calls_run_is_told_to_each_of_them(
    sampler: TransformersSampler, model: Path, adapter: Path, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(adapter, gone)
    await sampler.load_adapter("a@1", adapter)
    await sampler.load_adapter("gone@1", gone)
    shutil.rmtree(gone)
    before = await chat(sampler, ask("mail", adapter="a@1", seed=5, max_tokens=300))

    async def call(i: int) -> ChatReply:
        return await chat(sampler, ask(f"mail {i}", adapter="a@1", seed=i, max_tokens=300))

    # The longest of them: one of five tokens may end between the first delta and the kill.
    sizes = [len(reply.token_ids) for reply in await asyncio.gather(*map(call, range(12)))]
    longest = sorted(range(12), key=sizes.__getitem__)[-4:]
    assert sizes[longest[0]] >= 40
    calls = [asyncio.create_task(call(i)) for i in longest]
    stream = sampler.chat(ask(stream=True, seed=4, max_tokens=300))
    restarts = sampler.restarts
    assert isinstance(await anext(stream), ChatDelta)
    assert not any(call.done() for call in calls)
    assert sampler.pid
    os.kill(sampler.pid, signal.SIGKILL)
    waiting = asyncio.create_task(retried(sampler, ask("later", adapter="a@1", seed=9)))
    for died in await asyncio.gather(*calls, return_exceptions=True):  # none is sent again
        assert isinstance(died, WorkerDied) and "ended during this call" in str(died)
        assert died.retry_after
    check_logprobs(with_adapter(model, adapter), [await waiting])
    assert sampler.restarts == restarts + 1
    with pytest.raises(WorkerDied):  # its first half is out; only the caller can begin anew
        async for _ in stream:
            pass
    after = await chat(sampler, ask("mail", adapter="a@1", seed=5, max_tokens=300))
    assert after.token_ids == before.token_ids
    with pytest.raises(UnknownModel, match="gone@1"):  # what can not be restored is refused
        await chat(sampler, ask(adapter="gone@1"))
    for name in ("a@1", "gone@1"):
        await sampler.unload_adapter(name)


async def test_a_call_that_ran_at_two_deaths_does_not_get_a_third(
    sampler: TransformersSampler,
) -> None:
    poison, bystander = ask("kill", max_tokens=900, seed=1), ask("mail", max_tokens=900, seed=2)
    for beside in (True, False):  # the bystander runs at the first death only
        calls = [asyncio.create_task(chat(sampler, replace(poison, id=f"retry-{beside}")))]
        if beside:
            calls.append(asyncio.create_task(chat(sampler, bystander)))
        await asyncio.wait(calls, timeout=0.05)
        assert sampler.pid and not any(call.done() for call in calls)
        os.kill(sampler.pid, signal.SIGKILL)
        for died in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(died, WorkerDied)
        assert (await chat(sampler, bystander)).token_ids
    restarts = sampler.restarts
    with pytest.raises(InvalidRequest, match="ended 2 times while it had this very request"):
        await chat(sampler, replace(poison, id="third"))
    assert (await chat(sampler, replace(poison, messages=bystander.messages))).token_ids
    assert sampler.restarts == restarts


async def test_a_model_that_can_not_be_loaded_is_refused_in_words(tmp_path: Path) -> None:
    made = TransformersSampler(settings(tmp_path))
    with pytest.raises(EngineUnavailable, match="not started"):
        _ = made.info
    with pytest.raises(ConfigError, match="can not be loaded from this directory"):
        await made.start()
    await made.close()
