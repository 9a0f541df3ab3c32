"""``python -m benchmarks.gateways.upstream PORT``: answers as vLLM's server does, at once.

The answer is made beforehand: what is measured is the gateway. Its shape is that of vLLM's
``/v1/chat/completions`` with ``return_token_ids`` and ``logprobs``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

from benchmarks.gateways.exchange import sampled


def answer() -> bytes:
    drawn = sampled()
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(drawn["token_texts"], drawn["logprobs"], strict=True)
    ]
    message = {"role": "assistant", "content": drawn["content"], "refusal": None}
    message |= {"annotations": None, "audio": None, "function_call": None}
    message |= {"tool_calls": [], "reasoning": None}
    choice = {"index": 0, "message": message, "logprobs": {"content": content}}
    choice |= {"finish_reason": "stop", "stop_reason": None, "token_ids": drawn["token_ids"]}
    prompt, said = len(drawn["prompt_token_ids"]), len(drawn["token_ids"])
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + said, "completion_tokens": said}
    body = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "stub",
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage | {"prompt_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": drawn["prompt_token_ids"],
        "kv_transfer_params": None,
    }
    raw = json.dumps(body).encode()
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


class Upstream(asyncio.Protocol):
    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        _, _, rest = bytes(self._buffer[:end]).lower().partition(b"content-length:")
        length = int(rest.partition(b"\r\n")[0] or 0)
        if len(self._buffer) >= end + 4 + length:
            self._buffer.clear()
            self._transport.write(self._answer)


async def serve(port: int) -> None:
    made = answer()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(made), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
