"""The proxy that sees calls on their way: whatever a server streams, it passes on byte for byte."""

import json

import httpx
import pytest

from tests.conformance.suite.proxy import ProxyWitness
from tests.support.raw_server import RawServer, answer


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_stream_with_unicodes_line_separators_is_passed_on_and_noted(end: str) -> None:
    chunk = {
        "id": "chatcmpl-1",
        "choices": [
            {
                "delta": {"content": "a\u2028b\u2029c\x85d"},
                "logprobs": {"content": [{"token": "a\u2028b\u2029c\x85d", "logprob": -0.5}]},
            }
        ],
    }
    events = [f"data: {json.dumps(chunk, ensure_ascii=False)}", ": a comment", "data: [DONE]"]
    stream = "".join(event + 2 * end for event in events).encode()
    asked = {"model": "m", "messages": [{"role": "user", "content": "?"}], "stream": True}
    with RawServer() as server, ProxyWitness(server.base_url) as proxy:
        server.answers = [answer(stream, content_type="text/event-stream")]
        got = httpx.post(f"{proxy.base_url}/chat/completions", json=asked)
        assert got.content == stream
        [call] = proxy.calls()
        assert (call.id, call.logprobs) == ("chatcmpl-1", [-0.5])
