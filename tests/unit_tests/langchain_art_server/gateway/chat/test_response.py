import json
import sys

import httpx

from langchain_art_server.backends.base import ChatDelta, ChatReply
from langchain_art_server.gateway.chat.completion_format import ChatDialect, logprobs
from langchain_art_server.gateway.chat.request import CheckedChatRequest


async def test_an_event_is_one_line_whatever_the_model_says() -> None:
    characters = map(chr, range(sys.maxunicode + 1))
    ends = "".join(one for one in characters if len(f"a{one}b".splitlines()) > 1)
    said = f"höher{ends}, 文 \\u2028"
    function = {"name": said, "arguments": json.dumps({"a": said}, ensure_ascii=False)}
    call = {"id": "c", "type": "function", "function": function}
    reply = ChatReply([1], [2], [-0.5], said, [call], "stop", token_texts=[said])
    messages = [{"role": "user", "content": "a"}]
    chat = ChatDialect({"model": "m", "messages": messages, "logprobs": True, "stream": True})
    chat.begin({"id": "i", "created": 1, "model": "m"}, CheckedChatRequest(chat.body))
    written = [chat.delta(0, ChatDelta(said, [call])), await chat.end(0, reply)]
    lines = [line for line in httpx.Response(200, content=b"".join(written)).iter_lines() if line]
    first, last = (json.loads(line.removeprefix("data: "))["choices"][0] for line in lines)
    assert first["delta"] == {"content": said, "tool_calls": [{"index": 0, **call}], "id": "i"}
    assert [one["token"] for one in last["logprobs"]["content"]] == [said]


async def test_the_bytes_of_a_part_of_a_character_are_not_those_of_a_question_mark() -> None:
    texts, top = ["é", "\ufffd"], [[(2, -0.5, "é")], [(3, -0.5, "\ufffd\ufffd")]]
    reply = ChatReply([1], [2, 3], [-0.5] * 2, "é", [], "stop", None, top, token_texts=texts)
    whole, part = json.loads(await logprobs(reply))["content"]
    assert (whole["bytes"], whole["top_logprobs"][0]["bytes"]) == ([0xC3, 0xA9], [0xC3, 0xA9])
    assert part["token"] == "\ufffd" and part["bytes"] is part["top_logprobs"][0]["bytes"] is None
