"""One call, as both gateways see it: 14 messages of an agent's run, a reply of 128 tokens."""

from __future__ import annotations

import json
import random
from typing import Any

PROMPT_TOKENS, REPLY_TOKENS, MESSAGES = 900, 128, 14
_TEXT = "the mail of Ann was sent on Friday at ten for a review that is due by noon"


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_TEXT.split(), k=words))


def messages(seed: int) -> list[dict[str, Any]]:
    """A system prompt, a question, and six tool calls with their results."""
    rng = random.Random(seed)
    said: list[dict[str, Any]] = [
        {"role": "system", "content": _text(rng, 120)},
        {"role": "user", "content": _text(rng, 20)},
    ]
    while len(said) < MESSAGES:
        name = f"call_{len(said)}"
        function = {"name": "search_inbox", "arguments": f'{{"query": "{_text(rng, 4)}"}}'}
        call = {"id": name, "type": "function", "function": function}
        said += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": name, "content": _text(rng, 60)},
        ]
    return said


def in_responses(said: list[dict[str, Any]]) -> dict[str, Any]:
    """The same messages as a request's fields in OpenAI's Responses."""
    items: list[dict[str, Any]] = [said[1]]
    for one in said[2:]:
        if one["role"] == "tool":
            output = {"call_id": one["tool_call_id"], "output": one["content"]}
            items.append({"type": "function_call_output"} | output)
        else:
            [call] = one["tool_calls"]
            items.append({"type": "function_call", "call_id": call["id"]} | call["function"])
    return {"instructions": said[0]["content"], "input": items}


def in_messages(said: list[dict[str, Any]]) -> dict[str, Any]:
    """The same messages as a request's fields in Anthropic's Messages."""
    turns: list[dict[str, Any]] = [said[1]]
    for one in said[2:]:
        if one["role"] == "tool":
            block = {"tool_use_id": one["tool_call_id"], "content": one["content"]}
            turns.append({"role": "user", "content": [{"type": "tool_result"} | block]})
        else:
            [call] = one["tool_calls"]
            made = {"id": call["id"], "name": call["function"]["name"]}
            made |= {"type": "tool_use", "input": json.loads(call["function"]["arguments"])}
            turns.append({"role": "assistant", "content": [made]})
    return {"system": said[0]["content"], "messages": turns, "max_tokens": 1024}


def sampled() -> dict[str, Any]:
    """What the engine samples: ids, logprobs and texts of the reply, ids of the prompt."""
    rng = random.Random(0)
    texts = [f" {word}" for word in rng.choices(_TEXT.split(), k=REPLY_TOKENS)]
    return {
        "prompt_token_ids": [rng.randrange(150_000) for _ in range(PROMPT_TOKENS)],
        "token_ids": [rng.randrange(150_000) for _ in range(REPLY_TOKENS)],
        "logprobs": [-rng.expovariate(2.0) for _ in range(REPLY_TOKENS)],
        "token_texts": texts,
        "content": "".join(texts),
    }
