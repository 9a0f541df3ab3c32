"""The server itself: what it keeps, how it fails when it is told to, and what a person does."""

import base64
import gzip
import json
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

from langfuse import Langfuse
from opentelemetry.sdk.trace import TracerProvider

from tests.support.langfuse_server import routes
from tests.support.langfuse_server.scores import Refused, Score, checked, merged
from tests.support.langfuse_server.spans import Span

#: ``refused``: nothing listens. ``hang``: no answer until the fault ends. ``slow``: the answer
#: comes after `LangfuseServer.slow` seconds. ``die``: the next request is kept and its connection
#: closed without an answer; nothing listens from then on.
Fault = Literal["500", "429", "401", "400", "hang", "slow", "refused", "die"]


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    json: Any


class LangfuseServer:
    """Serves on loopback while its scope lasts.

    Example::

        with LangfuseServer() as server:
            client = server.client()
    """

    def __init__(self, version: str = "4.59.0") -> None:
        self.version = version
        self.lock = threading.RLock()
        self.requests: list[Asked] = []
        self.spans: list[Span] = []
        """As they were received; a span that was sent twice is here twice."""
        self.scores: dict[str, Score] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.models: list[dict[str, Any]] = []
        self.queues: dict[str, dict[str, Any]] = {}
        self.items: dict[str, dict[str, Any]] = {}
        self.visible_after = 0.0
        """Seconds from a row's arrival until the lists have it."""
        self.refuses: Callable[[Score], str | None] = lambda _: None
        """Why a score is refused (status 207); None: it is kept."""
        self.slow = 5.0
        self.broken: list[BaseException] = []
        """What went wrong in the stub itself: raised when its scope ends."""
        self._fault: Fault | None = None
        self._unhang = threading.Event()
        self._http: _Server | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.keys = (f"pk-lf-{uuid.uuid4()}", "sk-lf-test")
        """Its own: the SDK has one client a public key in a process, whatever the address."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead the SDK here."""
        names = ("LANGFUSE_BASE_URL", "LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")
        return dict(zip(names, (self.url, *self.keys), strict=True))

    def client(self) -> Langfuse:
        """A client of the SDK, with spans of its own."""
        public, secret = self.keys
        return Langfuse(
            base_url=self.url,
            public_key=public,
            secret_key=secret,
            tracer_provider=TracerProvider(),
        )

    @property
    def is_old(self) -> bool:
        """Whether it is older than the first server that SDK 5 can send scores to."""
        return tuple(map(int, self.version.split("."))) < (4, 59)

    # --- faults ---------------------------------------------------------------------------------

    @property
    def fault(self) -> Fault | None:
        """How it fails at present."""
        return self._fault

    @fault.setter
    def fault(self, fault: Fault | None) -> None:
        self._unhang.set()  # whoever hangs is let go without an answer
        self._unhang = threading.Event()
        self._fault = fault
        if fault == "refused":
            self._close()
        elif self._http is None:
            self._listen()

    def merge(self) -> None:
        """What ClickHouse does in its own time: rows of one span with one start become one.

        Seen: 159 of 588 rows of a project were doubles after a batch was sent again; a span that is
        sent with another start stays beside the first.
        """
        with self.lock:
            last = {(span.id, span.start): span for span in self.spans}
            self.spans = list(last.values())

    # --- what a person does ---------------------------------------------------------------------

    def annotate(
        self,
        trace_id: str,
        name: str,
        value: Any,
        *,
        observation_id: str | None = None,
        author: str | None = "ann",
        comment: str | None = None,
        data_type: str | None = None,
        queue: str | None = None,
        score_id: str | None = None,
        at: float | None = None,
    ) -> str:
        """A person scores a trace or an observation in the user interface; returns the score's id.

        Args:
            score_id: of a score that is changed: it keeps its timestamp, as in the interface.
            at: seconds since the epoch; None: now.
            queue: the queue's id that it was scored in: its item is completed.
        """
        named = [one for one in self.configs.values() if one["name"] == name]
        config = named[0] if named and data_type is None else None
        value, kind = checked(name, value, data_type, config)
        subject = {"kind": "trace", "id": trace_id}
        if observation_id is not None:
            subject = {"kind": "observation", "id": observation_id, "traceId": trace_id}
        old = self.scores.get(score_id) if score_id else None
        when = at if at is not None else old.timestamp if old else time.time()
        score = Score(
            id=score_id or uuid.uuid4().hex,
            name="output" if kind == "CORRECTION" else name,
            value=value,
            data_type=kind,
            subject=subject,
            source="ANNOTATION",
            comment=comment,
            config_id=config["id"] if config else None,
            queue_id=queue,
            author=author,
            timestamp=when,
        )
        self.keep(score)
        for item in self.items.values():
            if queue and item["queueId"] == queue and item["objectId"] == trace_id:
                item["status"] = "COMPLETED"
        return score.id

    def delete(self, scores: Sequence[str]) -> None:
        """Delete scores by their ids, as the interface and the API do; unknown ones are nothing."""
        with self.lock:
            for id_ in scores:
                self.scores.pop(id_, None)

    def keep(self, score: Score) -> None:
        """Keep a score; one of the same id is replaced.

        Seen with the same id and timestamp. Of another day's timestamp the rows would stay two
        (langfuse/langfuse-docs#3232), which this server does not show.
        """
        with self.lock:
            old = self.scores.get(score.id)
            self.scores[score.id] = merged(old, score) if old else score

    # --- what is read ---------------------------------------------------------------------------

    def visible_spans(self) -> list[Span]:
        """The rows that the lists have by now."""
        now = time.time()
        with self.lock:
            return [one for one in self.spans if now - one.received >= self.visible_after]

    def visible_scores(self) -> list[Score]:
        """The scores that the lists have by now."""
        now = time.time()
        with self.lock:
            found = self.scores.values()
            return [one for one in found if now - one.updated >= self.visible_after]

    def traces(self) -> dict[str, list[Span]]:
        """The spans by trace, each id once, in the order of their start."""
        found: dict[str, dict[str, Span]] = {}
        with self.lock:
            for span in sorted(self.spans, key=lambda one: one.start):
                found.setdefault(span.trace_id, {})[span.id] = span
        return {trace: list(spans.values()) for trace, spans in found.items()}

    def duplicates(self) -> dict[str, int]:
        """The ids of spans that were received more than once, and how often."""
        times = Counter(span.id for span in self.spans)
        return {id_: count for id_, count in times.items() if count > 1}

    # --- serving --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._listen()
        return self

    def __exit__(self, *exc: object) -> None:
        self._unhang.set()
        self._close()
        if self.broken:
            raise self.broken[0]

    def _listen(self) -> None:
        self._http = _Server(("127.0.0.1", self.port), _Handler)
        self._http.stub = self
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def _close(self) -> None:
        """Stop listening before a connection ends: whoever sees one end is refused from then on."""
        http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()
            http.drop_connections()

    def answered(self, asked: Asked, body: Any) -> tuple[int, Any] | None:
        """Status and body of a request's answer; None: the connection is closed without one."""
        fault = self._fault
        if fault == "hang":
            self._unhang.wait()
            return None
        if fault in ("500", "429", "401", "400"):
            return int(fault), {"message": f"the stub answers {fault}"}
        if fault == "slow":
            time.sleep(self.slow)
        expected = base64.b64encode(":".join(self.keys).encode()).decode()
        if asked.headers.get("authorization") != f"Basic {expected}":
            return 401, {"message": "Invalid credentials"}
        try:
            found = routes.answer(self, asked.method, asked.path, asked.query, body)
        except Refused as refused:
            found = 400, {"message": str(refused)}
        if fault == "die":
            self.fault = "refused"
            return None
        return found


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    stub: LangfuseServer

    def __init__(self, *args: Any) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def drop_connections(self) -> None:
        """End those that are kept open: a server that is gone answers on none."""
        for one in list(self._connections):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other side was first
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep what is wrong with the stub; clients may give up on one that hangs."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            self.stub.broken.append(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = gzip.decompress(raw) if self.headers.get("content-encoding") == "gzip" else raw
        typed = self.headers.get("content-type", "").startswith("application/json")
        headers = {name.lower(): value for name, value in self.headers.items()}
        sent = json.loads(body) if body and typed else None
        query = parse_qs(where.query, keep_blank_values=True)
        path = unquote(where.path)
        asked = Asked(self.command, path, query, headers, sent)
        with self.server.stub.lock:
            self.server.stub.requests.append(asked)
        found = self.server.stub.answered(asked, sent if typed else body)
        if found is None:
            self.close_connection = True
            return
        self._reply(*found)

    do_POST = do_DELETE = do_GET

    def _reply(self, status: int, reply: Any) -> None:
        protobuf = isinstance(reply, bytes)
        written = reply if protobuf else json.dumps(reply).encode()
        self.send_response(status)
        kind = "application/x-protobuf" if protobuf else "application/json"
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, format: str, *args: Any) -> None:
        pass
