"""A loopback proxy between the programs and a server: it sees each call, whoever records it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from langchain_art.chat_models.http_pools import httpx
from tests.conformance.suite.witness import Witnessed

_CHAT = "/chat/completions"
#: Headers that a proxy does not pass on: of one connection, or of an encoded body.
_OWN = {"connection", "content-length", "transfer-encoding", "content-encoding", "host"}


class _ProxyServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Let clients leave; all else is told."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class ProxyWitness:
    """Passes requests on, asks for log-probabilities, and notes what was asked and answered.

    A call is noted before the end of its answer is passed on. One whose client leaves, and one that
    the server refuses, is not noted.

    Args:
        server: the address of the server's API; ends with ``/v1``.
    """

    def __init__(self, server: str) -> None:
        self._upstream = server.removesuffix("/v1")
        self._client = httpx.Client(timeout=None, limits=httpx.Limits(max_connections=None))
        self._noted: list[Witnessed] = []
        self._lock = threading.Lock()
        witness = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                witness._pass_on(self)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = _ProxyServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._client.close()

    @property
    def base_url(self) -> str:
        """What the programs' models are given."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def calls(self) -> list[Witnessed]:
        """The calls that ended since it was last asked."""
        with self._lock:
            noted, self._noted = self._noted, []
        return noted

    def _pass_on(self, asked: BaseHTTPRequestHandler) -> None:
        body = asked.rfile.read(int(asked.headers.get("content-length") or 0))
        headers = {k: v for k, v in asked.headers.items() if k.lower() not in _OWN}
        sent: dict[str, Any] | None = json.loads(body) if asked.path.endswith(_CHAT) else None
        if sent is not None:
            body = json.dumps(sent | {"logprobs": True}).encode()
        url = self._upstream + asked.path
        with self._client.stream(asked.command, url, content=body, headers=headers) as answer:
            streams = "text/event-stream" in answer.headers.get("content-type", "")
            parts = self._streamed(answer, sent) if streams else self._whole(answer, sent)
            asked.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name.lower() not in _OWN:
                    asked.send_header(name, value)
            asked.send_header("transfer-encoding", "chunked")
            asked.end_headers()
            try:
                for part in parts:
                    asked.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                    asked.wfile.flush()
                asked.wfile.write(b"0\r\n\r\n")
            except (BrokenPipeError, ConnectionResetError):  # the client has left
                asked.close_connection = True

    def _whole(self, answer: httpx.Response, sent: dict[str, Any] | None) -> Iterator[bytes]:
        content = answer.read()
        if sent is not None and answer.status_code == 200:
            self._note(sent, [json.loads(content)])
        if content:
            yield content

    def _streamed(self, answer: httpx.Response, sent: dict[str, Any] | None) -> Iterator[bytes]:
        chunks: list[dict[str, Any]] = []
        for line in _lines(answer.iter_bytes()):
            data = line.removeprefix(b"data: ")
            if data.strip() == b"[DONE]":
                self._note(sent or {}, chunks)
            elif data != line:
                chunks.append(json.loads(data))
            yield line

    def _note(self, sent: dict[str, Any], parts: Iterable[dict[str, Any]]) -> None:
        """Note each choice of an answer; its parts are one, or the chunks of a stream."""
        choices: dict[str, dict[str, Any]] = {}
        for part in parts:
            for choice in part.get("choices") or ():
                index = choice.get("index") or 0
                id_ = part["id"] if index == 0 else f"{part['id']}:{index}"
                found = choices.setdefault(id_, {"reply": choice.get("message"), "logprobs": None})
                if (told := choice.get("logprobs")) and told.get("content") is not None:
                    found["logprobs"] = found["logprobs"] or []
                    found["logprobs"] += [token["logprob"] for token in told["content"]]
        noted = [Witnessed(id_, sent["messages"], **found) for id_, found in choices.items()]
        with self._lock:
            self._noted += noted


def _lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Lines with their ends. httpx's `iter_lines` ends one at U+2028, too, as a model may say."""
    rest = b""
    for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest
