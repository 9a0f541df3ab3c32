"""What takes long of a request is done beside the engine's loop, or not at all."""

import threading
from pathlib import Path
from typing import Any

import pytest

from langchain_art.errors import PromptTooLong
from langchain_art_server.backends.base import ChatRequest
from langchain_art_server.backends.chat.chat_template import ChatTemplate, Prompt
from langchain_art_server.backends.ipc.channel import EngineCall
from tests.support.tiny_models import LocalSampler, ask, save_adapter

LONG = "the mail of Ann " * 20


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, nobody has a prompt of LONG."""
    go, prompt = threading.Event(), ChatTemplate.prompt

    def slow(self: ChatTemplate, messages: list[dict[str, Any]], *rest: Any, **most: Any) -> Prompt:
        assert messages[0]["content"] != LONG or go.wait(60)
        return prompt(self, messages, *rest, **most)

    monkeypatch.setattr(ChatTemplate, "prompt", slow)
    return go


def send_long(sampler: LocalSampler, request: ChatRequest) -> EngineCall:
    call = sampler.send(request)
    call.size = 1 << 20
    return call


def test_others_are_sampled_while_a_long_prompt_is_tokenised(
    sampler: LocalSampler, go: threading.Event
) -> None:
    long, quick = send_long(sampler, ask(LONG, seed=1)), sampler.send(ask(seed=2))
    while quick.id not in sampler.results:
        sampler.host.step()
    assert long.id not in sampler.results
    go.set()
    sampler.run()
    (same,) = sampler.chat(ask(LONG, seed=1))
    assert sampler.reply(long).token_ids == same.token_ids
    assert sampler.reply(long).prompt_token_ids == same.prompt_token_ids


def test_an_adapter_is_in_use_while_its_prompt_is_tokenised(
    sampler: LocalSampler, go: threading.Event, model: Path, tmp_path: Path
) -> None:
    sampler.load("a@1", save_adapter(tmp_path / "a", model, 1))
    adapter = sampler.host._adapters["a@1"]
    answered = send_long(sampler, ask(LONG, adapter="a@1", seed=1))
    cancelled = send_long(sampler, ask(LONG, adapter="a@1", seed=2))
    sampler.unload("a@1")  # after both calls, as they came
    assert adapter.users == 2
    cancelled.cancelled = True
    go.set()
    sampler.run()
    while adapter.users:
        sampler.host.step()
    assert sampler.reply(answered).token_ids
    assert cancelled.id not in sampler.results


def test_what_cannot_fit_is_not_tokenised(
    sampler: LocalSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = sampler.host.info.max_prompt_chars
    assert most == 1024 * len("<|endoftext|>")
    with pytest.raises(PromptTooLong, match=r"too long: got .* tokens"):
        sampler.chat(ask("x" * (most - 100)))
    monkeypatch.setattr(ChatTemplate, "_encode", lambda *_: pytest.fail("it was tokenised"))
    with pytest.raises(PromptTooLong, match=f"expected at most {most}: more cannot fit"):
        sampler.chat(ask("x" * most))
