"""A chat server, and a sink for traces, that answer at once: ``python -m benchmarks.stubs.chat``.

It prints its port and serves until it is killed. The first part of a path says how it answers:

``/art/…``            128 tokens, text and a tool call, as our server gives them (the tokens' ids
                      and logprobs stay there, under the completion's id)
``/logprobs/…``       the same with OpenAI's ``logprobs``, as a client needs them that shall train
``/tools/N/…``        the first, until the prompt has N - 1 tool results; then text alone
``/logprob-tools/N/…``  the same with ``logprobs`` in the replies that call the tool
``/seen``             how many traces came, and of how many bytes
anything else         nothing, successfully: a trace went into the sink
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

TOKENS = 128
TEXT = " ".join(f"word{i}" for i in range(TOKENS // 2))
CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query": "falcon"}'},
}


def completion(message: dict[str, Any], logprobs: bool = False) -> bytes:
    tokens = [f" w{i}" for i in range(TOKENS)]
    content = [
        {"token": t, "logprob": -0.12345678 * i, "bytes": list(t.encode()), "top_logprobs": []}
        for i, t in enumerate(tokens)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant"} | message,
        "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        "logprobs": {"content": content, "refusal": None} if logprobs else None,
    }
    reply = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion",
        "created": 1_764_000_000,
        "model": "agent@3",
        "choices": [choice],
        "usage": {"prompt_tokens": 900, "completion_tokens": TOKENS, "total_tokens": 900 + TOKENS},
    }
    return json.dumps(reply).encode()


SAID = completion({"content": TEXT})
CALLED = completion({"content": TEXT, "tool_calls": [CALL]})
CALLED_WITH_LOGPROBS = completion({"content": TEXT, "tool_calls": [CALL]}, logprobs=True)


class Stub(asyncio.Protocol):
    seen: ClassVar = {"traces": 0, "bytes": 0}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._unread = transport, b""

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while (split := self._unread.find(b"\r\n\r\n")) >= 0:
            head = self._unread[:split].decode()
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:])
            end = split + 4 + int(fields.get("content-length", 0))
            if len(self._unread) < end:
                return
            body, self._unread = self._unread[split + 4 : end], self._unread[end:]
            self._answer(head.split(" ", 2)[1].split("/")[1:], body)

    def _answer(self, path: list[str], body: bytes) -> None:
        content, kind = b"", "application/json"
        if path[0] == "art":
            content = CALLED
        elif path[0] == "logprobs":
            content = CALLED_WITH_LOGPROBS
        elif path[0] in ("tools", "logprob-tools"):
            called = CALLED if path[0] == "tools" else CALLED_WITH_LOGPROBS
            content = called if body.count(b'"tool_call_id"') < int(path[1]) - 1 else SAID
        elif path[0] == "seen":
            content = json.dumps(self.seen).encode()
        else:
            kind = "application/x-protobuf"
            self.seen["traces"] += 1
            self.seen["bytes"] += len(body)
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n"
        self._transport.write(head.encode() + content)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
