"""A server on loopback that answers byte for byte as it is told, and drops what it is told to."""

from __future__ import annotations

import json
import socketserver
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.client import responses
from itertools import count
from typing import Any, Self


@dataclass
class Seen:
    """One request, as it came."""

    connection: int
    target: str
    headers: dict[str, str]
    body: Any


#: What to do with a request: bytes are sent; a function does as it likes with `send` and says
#: whether the connection may serve another request; None drops the connection unanswered.
Answer = bytes | Callable[[Callable[[bytes], None]], bool] | None

COMPLETION: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m@1",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "yes"},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}


def answer(body: Any = COMPLETION, status: int = 200, **headers: str) -> bytes:
    """A whole answer; ``retry_after="1"`` is a header."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    told = {"content-type": "application/json", "content-length": str(len(content))}
    told |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status} {responses[status]}", *(f"{k}: {v}" for k, v in told.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def refusal(status: int, **headers: str) -> bytes:
    """An error in OpenAI's shape."""
    error = {"message": f"no: {status}", "type": "t", "param": "p", "code": f"c{status}"}
    return answer({"error": error}, status, **headers)


class _Handler(socketserver.StreamRequestHandler):
    """One connection."""

    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        self._told = self.server.told
        if self._told.tls is not None:
            self.request = self._told.tls.wrap_socket(self.request, server_side=True)
        super().setup()

    def handle(self) -> None:
        number = next(self._told.connections)
        while (request := self._request(number)) is not None:
            self._told.seen.append(request)
            told = self._told.answers.pop(0) if self._told.answers else answer()
            if told is None:
                return
            if isinstance(told, bytes):
                self.wfile.write(told)
            elif not told(self.wfile.write):
                return

    def _request(self, number: int) -> Seen | None:
        try:
            first = self.rfile.readline().decode()
        except ConnectionError:
            return None
        if not first:
            return None
        headers: dict[str, str] = {}
        while line := self.rfile.readline().strip().decode():
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        body = self.rfile.read(int(headers.get("content-length", 0)))
        return Seen(number, first.split()[1], headers, json.loads(body or b"null"))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64
    told: RawServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: clients hang up here, or refuse the certificate, as they please."""


class RawServer:
    """Gives `answers` in order, then completions. `seen` is what it was asked.

    With `tls` it speaks that instead, as ``localhost``.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.answers: list[Answer] = []
        self.seen: list[Seen] = []
        self.connections = count()
        self.tls = tls
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.told = self
        self.port: int = self._server.server_address[1]
        self.root = f"http://127.0.0.1:{self.port}"
        if tls is not None:
            self.root = f"https://localhost:{self.port}"
        self.base_url = f"{self.root}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
