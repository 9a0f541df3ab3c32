"""A server on loopback that answers JSON with JSON, as a subclass says."""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Refusal(Exception):
    """Raised by `JsonServer.answer` for another status than 200."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(status)
        self.status, self.headers = status, headers


def completion(model: str, message: dict[str, Any], prompt: int, said: int) -> dict[str, Any]:
    """OpenAI's answer to a request for a chat completion, of so many tokens."""
    why = "tool_calls" if message.get("tool_calls") else "stop"
    usage = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
    return {
        "id": "h",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": why}],
        "usage": usage,
    }


class JsonServer:
    """Serves while its scope lasts. Subclasses write `answer`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        """Path and body of what was posted or patched."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept, as providers keep them

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                try:
                    parsed = json.loads(body)
                except ValueError:  # traces: OpenTelemetry's protobuf, LangSmith's multipart
                    parsed = None
                server.requests.append((self.path, parsed))
                self._answer(parsed)

            do_PATCH = do_POST

            def _answer(self, asked: Any) -> None:
                status, headers = 200, dict[str, str]()
                try:
                    found = server.answer(self.path, asked)
                except Refusal as refusal:
                    status, headers = refusal.status, refusal.headers
                    found = {"error": {"message": "refused", "type": "refused", "code": None}}
                kind, text = "application/json", json.dumps(found)
                if isinstance(found, str):
                    kind, text = "text/event-stream", found
                body = text.encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str, body: Any) -> Any:
        """What to say; `body` is None where there was none, or no JSON. A text: it is of events."""
        raise AssertionError(f"{type(self).__name__} does not answer {path}: {body}")

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
