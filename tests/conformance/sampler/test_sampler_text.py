"""The embedded sampler's text: exact continuation, stop strings, streams, tool calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from langchain_art_server.backends.base import ChatReply, ChatRequest
from langchain_art_server.backends.embedded.token_sampler import SampledTokens
from langchain_art_server.backends.ipc.channel import EngineCall
from tests.support.tiny_models import WEATHER, LocalSampler, ask, tokenizer

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'


Say = Callable[..., None]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Make the model say given tokens, whatever its weights: one script per seed."""

    def patch(*scripts: list[int]) -> None:
        class Scripted:
            def __init__(self, draws: Any, device: Any) -> None:
                self.draws = draws

            def sample(self, logits: torch.Tensor) -> SampledTokens:
                tokens: list[int] = []
                for draw in self.draws:
                    draw.said = getattr(draw, "said", -1) + 1
                    tokens.append(scripts[draw.sampling.seed or 0][draw.said])
                return SampledTokens(tokens, [-1.0] * len(tokens), torch.tensor(tokens))

        monkeypatch.setattr(
            "langchain_art_server.backends.embedded.scheduler.TokenSampler", Scripted
        )

    return patch


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def letters(text: str) -> list[int]:
    """A tokenisation that the tokenizer itself would never choose: every byte its own token."""
    return [token for char in text for token in ids(char)]


def follow_up(request: ChatRequest, reply: ChatReply) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        message["tool_calls"] = reply.tool_calls
    return [*request.messages, message]


# --- exact continuation -----------------------------------------------------------------------


def test_a_reply_that_was_cut_short_is_continued_exactly(sampler: LocalSampler, say: Say) -> None:
    odd = letters("the mail")
    say(odd)
    first = ask(max_tokens=len(odd))
    (reply,) = sampler.chat(first)
    assert reply.finish_reason == "length"
    messages = [*follow_up(first, reply), {"role": "user", "content": "go on"}]
    (second,) = sampler.chat(ask(messages=messages, max_tokens=1))
    known = reply.prompt_token_ids + odd
    assert second.prompt_token_ids[: len(known) + 1] == [*known, 2]


def test_siblings_with_the_same_rendered_reply_keep_their_own_tokens(
    sampler: LocalSampler, say: Say
) -> None:
    body = '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
    scripts = [
        [*ids("<tool_call>"), *encode(f"\n{body}\n"), *ids("</tool_call>"), 2]
        for encode in (ids, letters)
    ]
    assert scripts[0] != scripts[1]
    say(*scripts)
    requests = [ask(tools=[WEATHER], max_tokens=200, seed=i) for i in range(2)]
    replies = sampler.chat(*requests)
    for request, reply, script in zip(requests, replies, scripts, strict=True):
        messages = [*follow_up(request, reply), {"role": "tool", "content": "sunny"}]
        (next_,) = sampler.chat(ask(messages=messages, tools=[WEATHER], max_tokens=1))
        known = reply.prompt_token_ids + script
        assert next_.prompt_token_ids[: len(known)] == known


# --- tool calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_to_call_a_call_is_text(
    sampler: LocalSampler, say: Say, options: dict[str, Any]
) -> None:
    say([*ids(CALL), 2])
    (reply,) = sampler.chat(ask(max_tokens=100, **options))
    assert (reply.content, reply.tool_calls, reply.finish_reason) == (CALL, [], "stop")


def test_a_call_and_then_the_token_limit_is_length(sampler: LocalSampler, say: Say) -> None:
    script = ids(f"{CALL} and the mail of Ann")
    say(script)
    (reply,) = sampler.chat(ask(tools=[WEATHER], max_tokens=len(script) - 2))
    assert reply.finish_reason == "length"
    assert len(reply.tool_calls) == 1


# --- stop strings and streams -----------------------------------------------------------------


def test_a_stop_string_ends_the_reply_and_all_its_tokens_are_kept(
    sampler: LocalSampler, say: Say
) -> None:
    script = [*letters("the mail of Ann"), 2]
    say(script)
    (reply,) = sampler.chat(ask(stop=("zz", "l o"), max_tokens=50))
    assert reply.content == "the mai"
    assert reply.finish_reason == "stop"
    assert reply.token_ids == script[: len("the mail o")]
    assert reply.excluded_because is None


def streamed(sampler: LocalSampler, call: EngineCall) -> tuple[str, list[Any]]:
    events = sampler.events.get(call.id, [])
    text = "".join(event["content"] for event in events)
    return text, [c for event in events for c in event["tool_calls"]]


def test_tool_calls_are_streamed_whole_and_their_text_is_not(
    sampler: LocalSampler, say: Say
) -> None:
    say([*letters("see < the mail\n"), *ids(f"{CALL}\n{CALL}"), 2])
    call = sampler.send(ask(stream=True, tools=[WEATHER], max_tokens=300))
    sampler.run()
    reply = sampler.reply(call)
    text, calls = streamed(sampler, call)
    assert text == reply.content == "see < the mail"
    assert calls == reply.tool_calls
    assert len(calls) == 2
    with_calls = [e for e in sampler.events[call.id] if e["tool_calls"]]
    assert len(with_calls) == 2, "each call goes out as soon as it is closed"
