"""Clients that do not go on: what they hold is taken from them, and others are served meanwhile."""

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from langchain_art_server.config import Settings
from langchain_art_server.gateway import http_protocol
from langchain_art_server.gateway.auth import AccessControl
from langchain_art_server.gateway.http_protocol import DeadlineHttp
from tests.support import forked_start
from tests.support.live_server import REPO, HastyServer

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST = (
    b"POST /size HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)
CHUNKED = POST.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")


class Small:
    """The gateway's front, with short deadlines, before an application that counts."""

    def __init__(self) -> None:
        self.left, self.read = threading.Event(), threading.Event()
        self._opened: list[socket.socket] = []
        front = AccessControl(lambda _: self._answer, Settings(model="m", max_body_bytes=1 << 20))
        config = uvicorn.Config(
            front,
            port=0,
            http=DeadlineHttp,
            ws="none",
            lifespan="off",
            log_level="error",
            timeout_keep_alive=http_protocol.IDLE_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["path"]:
            case "/endless":
                answer: Response = StreamingResponse(self._endless())
            case "/late":
                answer = StreamingResponse(self._late(), headers={"X-A": "b"})
            case "/large":
                answer = Response(bytes(32 << 20))
            case _:
                answer = PlainTextResponse(str(len(await Request(scope, receive).body())))
        await answer(scope, receive, send)

    async def _endless(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 65536
                await asyncio.sleep(0)
        finally:
            self.left.set()

    async def _late(self) -> AsyncIterator[bytes]:
        await asyncio.to_thread(self.read.wait, 10)
        yield b"late"

    def connect(self, timeout: float = 60, host: str = "127.0.0.1") -> socket.socket:
        self._opened.append(socket.create_connection(("127.0.0.1", self.port), timeout, (host, 0)))
        return self._opened[-1]

    def forget(self) -> None:
        """Be as a new one: no connection, nothing told."""
        while self._opened:
            self._opened.pop().close()
        while self.kept():
            time.sleep(0.01)
        self.left.clear()
        self.read.clear()

    def ask(self, sent: bytes) -> bytes:
        """All that is answered until the server ends the connection, not by a reset."""
        with self.connect() as connection:
            connection.sendall(sent)
            return whole(connection)

    def kept(self) -> list[int]:
        """Bytes of the body of each connection's request."""
        open_ones = [cast(DeadlineHttp, one) for one in self._server.server_state.connections]
        return [len(one.cycle.body) if one.cycle else 0 for one in open_ones]

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def for_all() -> Iterator[Small]:
    server = Small()
    yield server
    server.stop()


@pytest.fixture
def small(for_all: Small, monkeypatch: pytest.MonkeyPatch) -> Iterator[Small]:
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", 0.4)
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 0.8)
    monkeypatch.setattr(http_protocol, "READ_SECONDS", 1.0)
    yield for_all
    for_all.forget()


def whole(connection: socket.socket) -> bytes:
    """All until the server ends it, which it must not do by a reset."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def said(connection: socket.socket) -> bytes:
    """All until the server closes."""
    parts = list[bytes]()
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def refusal(connection: socket.socket) -> tuple[int, str]:
    """Status and message of an answer in OpenAI's shape, before the connection is closed."""
    head, _, body = said(connection).partition(b"\r\n\r\n")
    assert b"application/json" in head and b"connection: close" in head.lower(), head
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def drip(connection: socket.socket, piece: bytes) -> None:
    """Send a piece again and again, until the server has answered or closed."""
    while not select.select([connection], [], [], 0.1)[0]:
        with contextlib.suppress(OSError):
            connection.sendall(piece)


def test_who_sends_no_whole_header_is_closed(small: Small) -> None:
    silent, slow, empty = small.connect(), small.connect(), small.connect()
    slow.sendall(GET)
    assert said(silent) == b""
    status, message = refusal(slow)
    assert status == 408 and "header" in message
    drip(empty, b"\r\n")
    assert said(empty) == b""
    slow = small.connect()
    slow.sendall(GET)
    drip(slow, b"X-A: b\r\n")
    assert refusal(slow)[0] == 408


def test_between_two_requests_there_is_time(small: Small) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{small.port}") as http:
        assert http.get("/healthz").status_code == 200
        time.sleep(1.5 * http_protocol.HEADER_SECONDS)
        assert http.get("/healthz").status_code == 200
    one = small.connect()
    one.sendall(GET + b"\r\n")
    assert b"200 OK" in one.recv(4096)
    one.sendall(GET)
    assert refusal(one)[0] == 408


def test_who_asks_whether_to_send_a_body_is_told(small: Small) -> None:
    """As curl does with large ones: it sends no byte before it is told to, for a second."""
    one = small.connect()
    one.sendall((POST % 3).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
    assert one.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
    one.sendall(b"123")
    assert b"200 OK" in (answer := one.recv(4096)) and answer.endswith(b"\r\n\r\n3")


def test_an_upgrade_that_is_not_spoken_is_ignored(small: Small) -> None:
    fields = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c, websocket\r\n"
    post = (POST % 10).replace(b"\r\n", b"\r\n" + fields, 1) + b'{"a": 123}'
    chunked = post.replace(b"Content-Length: 10", b"Transfer-Encoding: chunked")
    chunked = chunked.replace(b'{"a"', b'a\r\n{"a"') + b"\r\n0\r\n\r\n"
    whole = post + chunked + GET + fields + b"\r\n" + GET + b"Connection: close\r\n\r\n"
    for pieces in (1, 2, 1000):
        with small.connect() as connection:
            size = -(-len(whole) // pieces)
            for start in range(0, len(whole), size):
                connection.sendall(whole[start : start + size])
            answers = said(connection).split(b"HTTP/1.1 ")[1:]
        assert [one[:3] for one in answers] == [b"200"] * 4
        assert [one.rpartition(b"\r\n\r\n")[2] for one in answers] == [b"10", b"10", b"0", b"0"]


def test_a_tunnel_is_refused_in_one_line(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    for target in (b"a:1", b"localhost:80", b"/x", b"[::1]:443"):
        for first in (b"", GET + b"\r\n"):
            caplog.clear()
            connect = b"CONNECT %b HTTP/1.1\r\nHost: a\r\n\r\n" % target
            answers = small.ask(first + connect).split(b"HTTP/1.1 ")[1:]
            assert [one[:3] for one in answers] == [b"200"] * bool(first) + [b"400"]
            assert len(caplog.records) <= 1 and all(not one.exc_info for one in caplog.records)


def test_what_came_before_a_refused_request_is_answered_first(small: Small) -> None:
    for wrong in ((GET + b"\r\n") * 5000, b"no HTTP\r\n\r\n", b"GET / HTTP/9\r\n"):
        sent = (GET + b"\r\n") * 3 + (POST % 2) + b"{}" + wrong
        *answered, refused = small.ask(sent).split(b"HTTP/1.1 ")[1:]
        assert {one[:3] for one in answered} == {b"200"} and refused.startswith(b"400")
        bodies = [one.rpartition(b"\r\n\r\n")[2] for one in answered]
        assert bodies[:4] == [b"0", b"0", b"0", b"2"]
        assert len(bodies) >= (http_protocol.MAX_AHEAD if wrong.startswith(GET) else 4)
        assert f"at most {http_protocol.MAX_AHEAD} requests".encode() in refused


def test_a_header_goes_out_before_a_body_that_comes_later(small: Small) -> None:
    one = small.connect()
    one.sendall(GET.replace(b"healthz", b"late") + b"\r\n")
    assert (head := one.recv(4096)).endswith(b"\r\n\r\n") and b"x-a: b" in head
    small.read.set()
    assert b"late" in one.recv(4096)
    one.sendall(GET.replace(b"GET", b"HEAD") + b"Connection: close\r\n\r\n")
    assert (head := whole(one)).endswith(b"\r\n\r\n") and b"200 OK" in head


def test_who_speaks_http_1_0_gets_no_chunks(small: Small) -> None:
    """RFC 9112, 6.1; the end of the connection is the end of the answer."""
    small.read.set()
    for path, expected in ((b"/late", b"late"), (b"/large", bytes(32 << 20)), (b"/", b"0")):
        head, _, body = small.ask(b"GET %b HTTP/1.0\r\n\r\n" % path).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"keep-alive" not in head
        assert body == expected


def test_who_may_keep_its_connection_is_told_how_long(small: Small) -> None:
    """Shorter than the server keeps it, so that no request meets a connection that it closes."""
    small.read.set()
    for path in (b"/", b"/late"):
        one = small.connect()
        for _ in range(2):
            one.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
            answer = b""
            while not answer.endswith((b"\r\n\r\n0", b"\r\n0\r\n\r\n")):
                answer += one.recv(4096)
            assert b"\r\nconnection: keep-alive\r\n" in answer
            [told] = re.findall(rb"\r\nkeep-alive: timeout=(\d+)\r\n", answer)
            assert 60 < int(told) < http_protocol.IDLE_SECONDS  # load balancers keep theirs for 60
        one.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path)
        last = said(one)
        assert b"keep-alive" not in last and last.count(b"connection: close") == 1


def test_a_header_has_a_size(small: Small) -> None:
    for header in (
        GET + b"".join(b"A%d: b\r\n" % n for n in range(500)) + b"\r\n",
        GET + b"A: " + b"b" * 400_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 400_000 + b" HTTP/1.1\r\n\r\n",
    ):
        assert small.ask(header).startswith(b"HTTP/1.1 400")


def test_trailers_and_chunk_extensions_have_a_size(small: Small) -> None:
    for piece in (b"A: b\r\n" * 100, b"A: " + b"b" * 700):
        for before in (b"0\r\n", b"1\r\n1\r\n0\r\n", b"1;a=", b"1\r\n1\r\n1;"):
            connection = small.connect()
            connection.sendall(CHUNKED + before)
            sent = 0
            # The name of a field goes on for as long as no line ends, and so does an extension.
            part = piece if before.endswith(b"0\r\n") else piece.replace(b"\r\n", b"")
            while not select.select([connection], [], [], 0.001)[0]:
                connection.sendall(part)
                sent += len(part)
                part = part.removeprefix(b"A: ") if len(part) == 703 else part
            assert sent < 2 << 20
            assert b"HTTP/1.1 400" in whole(connection)


def test_a_body_of_tiny_chunks_is_a_body(small: Small) -> None:
    """Its framing is five times its bytes, and has no limit of its own."""
    sent = CHUNKED + b"1\r\n1\r\n" * 40_000 + b"0\r\nA: b\r\n\r\n"
    answer = small.ask(sent + GET + b"Connection: close\r\n\r\n")
    first, second = answer.split(b"HTTP/1.1 200")[1:]
    assert first.endswith(b"40000") and second.endswith(b"0")


REFUSED = (POST % (4 << 20)).replace(b"/json", b"/pdf")  # by its header


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"], ids=["stays", "closes"])
def test_who_is_refused_before_it_has_sent_all_hears_why(small: Small, header: bytes) -> None:
    connection = small.connect()
    connection.sendall(REFUSED[:-2] + header + b"\r\n")
    assert select.select([connection], [], [], 60)[0]  # it is answered
    for _ in range(64):
        connection.sendall(bytes(1 << 16))
    if header:
        assert b"Content-Type" in whole(connection)
    else:
        connection.sendall(GET + b"Connection: close\r\n\r\n")
        first, _, second = whole(connection).partition(b"HTTP/1.1 200 OK")
        assert first.startswith(b"HTTP/1.1 400") and second.endswith(b"\r\n\r\n0")


def test_who_is_refused_does_not_send_for_ever(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_LINGER_BYTES", 1 << 20)
    connection = small.connect()
    connection.sendall(REFUSED.replace(b"\r\n\r\n", b"000\r\n\r\n"))
    assert select.select([connection], [], [], 60)[0]
    sent = 0
    with pytest.raises(ConnectionError):
        while sent < 200 << 20:
            sent += connection.send(bytes(1 << 20))
    slow = small.connect()
    slow.sendall(REFUSED)
    assert b"HTTP/1.1 400" in said(slow)
    with pytest.raises(ConnectionError):
        while True:
            slow.sendall(b" ")
            time.sleep(0.1)


def is_served(connection: socket.socket) -> bool:
    """False if the server has closed it, at once or with a refusal."""
    try:
        connection.sendall(GET + b"\r\n")
        answer = connection.recv(4096)
    except ConnectionError:
        return False
    assert not answer or answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")), answer
    return answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "begun", [b"", GET, POST % 9, GET + b"\r\n"], ids=["new", "header", "body", "kept"]
)
def test_an_address_keeps_no_connection_from_another(
    small: Small, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", 20.0)
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 20.0)
    monkeypatch.setattr(DeadlineHttp, "limit", 8)
    many = [small.connect() for _ in range(8)]
    for one in many:
        one.sendall(begun)
        assert not begun.endswith(b"\r\n\r\n") or b"POST" in begun or one.recv(4096)
    assert not is_served(small.connect()), "an address had room beyond the limit"
    others = [small.connect(host="127.0.0.2") for _ in range(4)]
    assert all(is_served(one) for one in others)
    assert not is_served(small.connect(host="127.0.0.2")), "it had more than its share"
    third = small.connect(host="127.0.0.3")
    assert is_served(third)
    closed = [one for one in many + others if select.select([one], [], [], 0)[0]]
    assert len(closed) == 5 and sum(one in many for one in closed) >= 4
    hear = [] if begun == GET + b"\r\n" else [one for one in closed if one in many]
    assert all(said(one).startswith(b"HTTP/1.1 503") for one in hear)


def test_an_answer_is_not_cut_for_a_connection_of_another_address(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeadlineHttp, "limit", 4)
    late = [small.connect() for _ in range(4)]
    for one in late:
        one.sendall(GET.replace(b"healthz", b"late") + b"Connection: close\r\n\r\n")
        assert b"200 OK" in one.recv(4096)
    assert not is_served(small.connect(host="127.0.0.2"))
    small.read.set()
    assert all(b"late" in said(one) for one in late)
    assert is_served(small.connect(host="127.0.0.2"))


def test_a_process_that_was_stopped_reads_what_came_meanwhile(tmp_path: Path) -> None:
    log = tmp_path / "said"
    child = forked_start.start(__name__, [], os.environ, REPO, log)
    try:
        while not (said := log.read_text()).endswith("\n"):
            assert child.poll() is None, said
            time.sleep(0.01)
        idle, slow = (socket.create_connection(("127.0.0.1", int(said)), 60) for _ in range(2))
        idle.sendall(GET + b"\r\n")
        answer = b""
        while not answer.endswith(b"\r\n\r\n0"):
            answer += idle.recv(4096)
        slow.sendall(GET)
        time.sleep(0.1)
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.2)  # it is stopped by now
        for connection in (idle, slow):
            connection.sendall((GET if connection is idle else b"") + b"Connection: close\r\n\r\n")
        time.sleep(1.5)
        child.send_signal(signal.SIGCONT)
        for connection in (idle, slow):
            assert whole(connection).startswith(b"HTTP/1.1 200")
    finally:
        child.kill()


def test_a_slow_body_is_answered_408(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = small.connect()
    connection.sendall(POST % 100)
    drip(connection, b" ")
    status, message = refusal(connection)
    assert status == 408 and "body" in message
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 60.0)
    quick = small.connect()
    quick.sendall(POST % 100 + b" " * 50)
    time.sleep(0.1)
    quick.sendall(b" " * 50)
    assert quick.recv(4096).endswith(b"100")


def test_unfinished_bodies_share_their_memory(small: Small) -> None:
    size = 1 << 20
    slow = [small.connect() for _ in range(8)]
    for connection in slow:
        connection.sendall(POST % size + b" " * (size - 1))
    answers = [said(connection) for connection in slow]
    assert sum(b"HTTP/1.1 503" in answer for answer in answers) >= 6
    assert sum(b"HTTP/1.1 408" in answer for answer in answers) >= 1
    assert all(b"retry-after" in answer for answer in answers if b" 503 " in answer)


def test_the_rest_of_a_refused_body_is_read_slowly(small: Small) -> None:
    """Read at once, it keeps the event loop from others: a socket has megabytes ready."""
    connections = [small.connect(0.1) for _ in range(4)]
    for connection in connections:
        connection.sendall(POST % (1 << 40))
    begun, sent = time.monotonic(), 0
    while time.monotonic() - begun < 0.5:
        for connection in connections:
            with contextlib.suppress(TimeoutError):
                sent += connection.send(bytes(1 << 20))
    # Of each socket the buffers too.
    assert sent < (64 + 4 * 8) << 20
    assert all(b"HTTP/1.1 413" in connection.recv(4096) for connection in connections)


def test_nothing_of_a_refused_body_is_kept(small: Small) -> None:
    """Each would have some 200 KB, and a client makes a hundred such requests in a second."""
    connections = [small.connect() for _ in range(4)]
    for connection in connections:
        connection.sendall(POST % (1 << 30) + bytes(200 << 10))
        assert b"HTTP/1.1 413" in connection.recv(4096)
        connection.sendall(bytes(100 << 10))
    deadline = time.monotonic() + 60
    while (kept := small.kept()) != [0] * 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert kept == [0] * 4


def test_who_sends_too_much_is_told_so(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", 20.0)  # beside busy processes, too
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 20.0)

    root, sizes = f"http://127.0.0.1:{small.port}", (2 << 20, 30 << 20, 2 << 20)

    async def in_turn() -> list[int]:
        async with httpx.AsyncClient(base_url=root) as http:
            return [(await http.post("/size", json="x" * size)).status_code for size in sizes]

    assert asyncio.run(in_turn()) == [413] * 3
    with httpx.Client(base_url=root) as http:
        assert [http.post("/size", json="x" * size).status_code for size in sizes] == [413] * 3
        assert http.post("/size", json="x").text == "3"


def test_who_does_not_read_loses_its_answer(small: Small) -> None:
    connection = small.connect()
    connection.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert connection.recv(10)
    assert small.left.wait(60)
    with httpx.stream("GET", f"http://127.0.0.1:{small.port}/endless") as reader:
        small.left.clear()
        begun = time.monotonic()
        for _ in reader.iter_bytes():  # longer than the deadline
            if time.monotonic() - begun > 1.5:
                assert not small.left.is_set()
                break  # which closes the connection


def test_who_reads_slowly_keeps_a_large_answer(small: Small) -> None:
    connection = small.connect()
    connection.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    parts = list[int]()
    while part := connection.recv(1 << 20):
        parts.append(len(part))
        time.sleep(0.08)
    assert sum(parts) > 32 << 20 and len(parts) * 0.08 > 2 * http_protocol.READ_SECONDS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HastyServer]:
    data = tmp_path_factory.mktemp("hostile") / "data"
    with HastyServer(data, settings="max_running_calls = 32\n") as made:
        yield made


@pytest.mark.slow
def test_streams_that_are_not_read_keep_nobody_waiting(server: HastyServer) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        **{"n": 16, "stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 300},
    }
    readers = [unread(server.port, body) for _ in range(2)]
    with (
        httpx.HTTPTransport(local_address="127.0.0.2") as transport,
        httpx.Client(transport=transport, base_url=server.root, timeout=60) as other,
    ):
        refused = 0
        ask: dict[str, Any] = {"model": "tiny", "messages": body["messages"], "max_tokens": 4}
        while other.post("/v1/chat/completions", json=ask).status_code != 200:
            refused += 1
            assert refused < 1200, "unread streams hold all slots"
            time.sleep(0.1)
    for reader in readers:
        reader.close()


def unread(port: int, body: dict[str, Any]) -> socket.socket:
    """A stream that is asked for and not read."""
    content = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    head = POST.replace(b"/size", b"/v1/chat/completions") % len(content)
    connection.sendall(head + content)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


if __name__ == "__main__":
    # A server that waits a second for what it waits for, until this process is killed.
    http_protocol.HEADER_SECONDS = http_protocol.IDLE_SECONDS = 1
    print(Small().port, flush=True)  # noqa: T201 - to the process that started this one
    time.sleep(60)
