"""LangSmith's and Langfuse's APIs on loopback, as far as their SDKs need; what is sent is kept."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs

EXAMPLE = "00000000-0000-4000-8000-000000000001"
DATASET = "00000000-0000-4000-8000-0000000000da"
TENANT = "00000000-0000-4000-8000-0000000000ee"
NOW = "2026-01-01T00:00:00+00:00"


def run_id(number: int) -> str:
    return f"00000000-0000-4000-8000-1000000000{number:02}"


class Hosted:
    """One server for both.

    Args:
        outputs: what LangSmith knows of runs: experiment's id -> their outputs.
        names: experiment's name -> its id.
    """

    def __init__(
        self,
        outputs: dict[str, list[dict[str, Any]]] | None = None,
        names: dict[str, str] | None = None,
    ) -> None:
        self.outputs = outputs or {}
        self.names = names or {}
        self.seen: list[tuple[str, Any]] = []
        hosted = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(hosted.answer(self.path, None))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                try:
                    parsed = json.loads(body)
                except ValueError:  # traces: OpenTelemetry's protobuf, LangSmith's multipart
                    parsed = None
                hosted.seen.append((self.path, parsed))
                self._answer(hosted.answer(self.path, parsed))

            do_PATCH = do_POST

            def _answer(self, value: Any) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def posted(self, path: str) -> list[Any]:
        return [body for seen, body in self.seen if seen.partition("?")[0] == path]

    def answer(self, path: str, body: Any) -> Any:
        path, _, query = path.partition("?")
        asked = parse_qs(query)
        if path == "/info":
            return {"version": "0", "instance_flags": {}}
        if path == "/sessions":
            return [self.session(self.names[asked["name"][0]])]
        if path == "/datasets":
            return [{"id": DATASET, "name": asked["name"][0], "created_at": NOW}]
        if path.startswith("/sessions/"):
            return self.session(path.rpartition("/")[2])
        if path == "/examples":
            return [
                {
                    "id": EXAMPLE,
                    "dataset_id": DATASET,
                    "inputs": {"input": "When is the audit?"},
                    "outputs": {"answer": "14 March"},
                    "created_at": NOW,
                }
            ]
        if path == "/runs/query":
            (experiment,) = body["session"]
            return {"runs": self.runs(experiment), "cursors": {"next": None}}
        if path == "/datasets/comparative":
            return {**body, "tenant_id": TENANT, "modified_at": NOW, "created_at": NOW}
        return {}

    def session(self, id: str) -> dict[str, Any]:
        return {
            "id": id,
            "name": id,
            "tenant_id": TENANT,
            "reference_dataset_id": DATASET,
            "start_time": NOW,
        }

    def runs(self, experiment: str) -> list[dict[str, Any]]:
        first = 10 * list(self.outputs).index(experiment)
        return [
            {
                "id": run_id(first + n),
                "name": "target",
                "start_time": NOW,
                "run_type": "chain",
                "inputs": {"input": "When is the audit?"},
                "outputs": outputs,
                "reference_example_id": EXAMPLE,
                "session_id": experiment,
                "trace_id": run_id(first + n),
                "dotted_order": f"20260101T000000000000Z{run_id(first + n)}",
            }
            for n, outputs in enumerate(self.outputs[experiment])
        ]
