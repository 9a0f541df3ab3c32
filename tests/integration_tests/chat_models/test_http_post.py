"""Keep-alive connections: no request may get another request's answer."""

import asyncio
import io
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.chat_models import http_pools, http_post
from langchain_art.chat_models.http_pools import httpx
from langchain_art.chat_models.http_post import (
    POST_ERRORS,
    Answer,
    AnswerParser,
    Connections,
    Target,
    post_async,
)
from tests.support.raw_server import RawServer, answer

Send = Callable[[bytes], None]


def target(url: str, **limits: float) -> Target:
    return Target(httpx.Request("POST", url), {"host": "localhost"}, **limits)


class Client:
    """Either kind, with one interface."""

    def __init__(self, kind: str) -> None:
        self._runner = asyncio.Runner()
        self.is_sync = kind == "sync"
        self._connections = Connections() if self.is_sync else None

    def send(self, url: str, said: Any = "hi", **limits: float) -> Answer:
        return self.send_to(target(url, **limits), json.dumps(said).encode())

    def send_to(self, there: Target, body: bytes = b"1") -> Answer:
        if self._connections is not None:
            return self._connections.post(there, body)
        return self._runner.run(post_async(there, body))

    def post(self, url: str, said: Any = "hi", **limits: float) -> Any:
        return self.send(url, said, **limits).response.json()

    def burst(self, there: Target) -> None:
        """Eight requests at once."""

        async def burst() -> None:
            await asyncio.gather(*(post_async(there, b"1") for _ in range(8)))

        if self._connections is None:
            return self._runner.run(burst())
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: self.send_to(there), range(40)))

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
        if self._connections is None:  # a loop that does not run receives nothing
            self._runner.run(asyncio.sleep(seconds))

    def idle(self) -> int:
        """How many connections are kept."""
        if self._connections is not None:
            return len(self._connections._idle)
        kept = http_post._loops.get(self._runner.get_loop())
        return 0 if kept is None else len(kept.idle)

    def close(self) -> None:
        self._runner.close()


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    client = Client(request.param)
    yield client
    client.close()


@pytest.fixture
def server() -> Iterator[RawServer]:
    with RawServer() as server:
        yield server


POSTED = httpx.Request("POST", "http://localhost/v1")
NAMES = st.text("abcdefgh-", min_size=1, max_size=8).map(lambda name: f"x-{name}")
VALUES = st.text("abc 123;=/", max_size=12).map(str.strip)


@given(
    st.sampled_from([200, 201, 301, 400, 404, 429, 500, 503]),
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.lists(st.binary(min_size=1, max_size=300), max_size=4),
    st.sampled_from(["length", "chunked", "close"]),
    st.booleans(),
    st.data(),
)
def test_an_answer_in_pieces_is_as_http_client_reads_it(
    status: int,
    headers: list[tuple[str, str]],
    parts: list[bytes],
    framing: str,
    keep: bool,
    data: st.DataObject,
) -> None:
    body = b"".join(parts)
    told = [*headers, ("connection", "keep-alive" if keep else "close")]
    if framing == "length":
        told.append(("content-length", str(len(body))))
    elif framing == "chunked":
        told.append(("transfer-encoding", "chunked"))
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    head = "".join(f"{name}: {value}\r\n" for name, value in told)
    whole = f"HTTP/1.1 {status} Said\r\n{head}\r\n".encode() + body
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

    socket: Any = SimpleNamespace(makefile=lambda mode: io.BytesIO(whole))
    wanted = HTTPResponse(socket, method="POST")
    wanted.begin()
    content, parser = wanted.read(), AnswerParser()
    for piece in [*filter(None, pieces), *([b""] if framing == "close" else [])]:
        parser.feed(piece)
    assert parser.is_complete
    assert parser.keeps_connection == (keep and framing != "close") == (not wanted.will_close)
    found = parser.answer(POSTED)
    assert (found.status, found.content) == (wanted.status, content)
    told_back = [(name.decode(), value.decode()) for name, value in found.raw_headers]
    assert told_back == wanted.getheaders()


def connections(server: RawServer) -> list[int]:
    return [seen.connection for seen in server.seen]


def test_a_second_answer_is_not_the_next_requests(server: RawServer, client: Client) -> None:
    server.answers = [answer("mine") + answer("nobody's"), answer("next")]
    assert [client.post(server.root), client.post(server.root)] == ["mine", "next"]


def test_a_header_cannot_begin_another(server: RawServer, client: Client) -> None:
    there = replace(target(server.root), headers={"host": "localhost", "a": "b\r\nc: d"})
    with pytest.raises(ValueError, match="header"):
        client.send_to(there)
    assert not server.seen


def test_late_data_is_not_the_next_requests(server: RawServer, client: Client) -> None:
    def late(send: Send) -> bool:
        send(answer("mine"))
        time.sleep(0.05)
        send(answer("nobody's"))
        return True

    server.answers = [late, answer("next")]
    assert client.post(server.root) == "mine"
    client.wait(0.2)
    assert client.post(server.root) == "next"
    assert connections(server) == [0, 1]


async def test_a_cancelled_requests_answer_is_not_the_next_ones(server: RawServer) -> None:
    asked, cancelled = threading.Event(), threading.Event()

    def held(send: Send) -> bool:
        asked.set()
        cancelled.wait(20)
        send(answer("the cancelled one's"))
        return True

    server.answers = [held, answer("next")]
    there = target(server.root)
    task = asyncio.create_task(post_async(there, b"1"))
    await asyncio.to_thread(asked.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    cancelled.set()
    assert (await post_async(there, b"2")).response.json() == "next"


async def test_many_at_once(server: RawServer) -> None:
    def echo(send: Send) -> bool:
        send(answer(server.seen[-1].body))
        return True

    there = target(server.root)
    for _ in range(3):
        server.answers = [answer("same")] * 50
        await asyncio.gather(*(post_async(there, b"%d" % i) for i in range(50)))
    assert len(set(connections(server))) <= 50
    server.answers = [echo] * 20
    for i in range(20):
        assert (await post_async(there, b"%d" % i)).response.json() == i


def test_answers_of_other_kinds(server: RawServer, client: Client) -> None:
    def old(send: Send) -> bool:  # it ends with its connection
        send(b'HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n"al')
        send(b'l"')
        return False

    hints = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + answer("said")
    server.answers = [old, hints, answer("next")]
    assert [client.post(server.root) for _ in range(3)] == ["all", "said", "next"]
    assert connections(server) == [0, 1, 1]


def test_answers_that_are_not_whole_or_not_what_they_say(server: RawServer, client: Client) -> None:
    ok = b"HTTP/1.1 200 OK\r\n"
    chunked = ok + b"transfer-encoding: chunked\r\n\r\n"
    for broken in (
        *(b"", b"HTTP/1.1 200", b"SSH-2.0-OpenSSH\r\n\r\n", ok + b"content-length: 9\r\n\r\n1"),
        *(chunked + b"5\r\n1", chunked + b"1\r\n1\r\n", chunked + b"not a number\r\n"),
    ):

        def play(send: Send, broken: bytes = broken) -> bool:
            send(broken)
            return False

        server.answers = [play, answer("next")]
        with pytest.raises(POST_ERRORS):
            client.post(server.root)
        assert client.post(server.root) == "next"
    server.answers = [answer(b"no gzip", content_encoding="gzip")]
    with pytest.raises(httpx.DecodingError):
        client.post(server.root)
    assert client.post(server.root)["model"] == "m@1"


def test_a_refusal_before_all_was_sent(client: Client) -> None:
    """The server answers on seeing the head; it reads the rest later, or the kernel would reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer("too long", 413, connection="close"))
                while connection.recv(1 << 20):
                    pass

        threading.Thread(target=serve, daemon=True).start()
        port = listener.getsockname()[1]
        assert client.post(f"http://127.0.0.1:{port}", "x" * 20_000_000) == "too long"
    assert client.idle() == 0


#: Bytes of an answer between two pauses.
PIECE = 5


def test_the_limit_is_on_silence(server: RawServer, client: Client) -> None:
    done = threading.Event()

    def slow(send: Send) -> bool:
        said = answer("slow")
        for at in range(0, len(said), PIECE):
            time.sleep(0.1)
            send(said[at : at + PIECE])
        return True

    def stalled(send: Send) -> bool:
        send(answer("never")[:-3])
        done.wait()
        return False

    server.answers = [slow, stalled]
    limit = 0.08 * len(answer("slow")) / PIECE  # less than all the pauses together
    assert client.post(server.root, read_timeout=limit) == "slow"
    with pytest.raises(TimeoutError):
        client.post(server.root, read_timeout=0.2)
    done.set()
    assert client.idle() == 0


def test_a_server_that_takes_no_connection(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        queue = [socket.socket() for _ in range(4)]
        for one in queue:
            one.setblocking(False)
            one.connect_ex(address)
        with pytest.raises(TimeoutError):
            client.post(f"http://127.0.0.1:{address[1]}", connect_timeout=0.3)
        for one in queue:
            one.close()
    with pytest.raises(ConnectionRefusedError):
        client.post(f"http://127.0.0.1:{address[1]}")


def test_idle_connections_are_kept_for_a_while(
    server: RawServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_post, "_IDLE_SECONDS", 60.0)
    client.post(server.root)
    client.post(server.root)
    assert connections(server) == [0, 0]
    assert client.idle() == 1
    monkeypatch.setattr(http_post, "_IDLE_SECONDS", 0.05)
    client.wait(0.2)
    client.post(server.root)
    assert connections(server) == [0, 0, 1]
    assert client.idle() == 1


def test_connections_of_a_burst_are_closed(
    server: RawServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_post, "_IDLE_SECONDS", 0.2)
    client.burst(target(server.root))
    client.wait(0.5)
    if not client.is_sync:  # its timer closes them; a synchronous one has none
        assert client.idle() == 0
    client.post(server.root)
    assert client.idle() == 1


def test_connections_of_closed_loops_are_closed(server: RawServer) -> None:
    there = target(server.root)
    for _ in range(5):
        asyncio.run(post_async(there, b"1"))
    assert sum(loop.is_closed() for loop in http_post._loops) == 1
    assert connections(server) == [0, 1, 2, 3, 4]


def test_another_event_loop(server: RawServer) -> None:
    """LangGraph's server has uvloop's, whose connections take fewer options than asyncio's."""
    uvloop = pytest.importorskip("uvloop", reason="uvloop has no release for this system")
    server.answers = [answer("mine") + answer("nobody's"), answer("next")]

    async def both() -> list[Any]:
        there = target(server.root, connect_timeout=5.0, read_timeout=5.0)
        return [(await post_async(there, b"1")).response.json() for _ in range(2)]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(both()) == ["mine", "next"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("of_the_sdk", [False, True])
def test_a_forked_process_opens_its_own(server: RawServer, of_the_sdk: bool) -> None:
    kept, there = Connections(), target(server.root)

    def post(body: bytes) -> None:
        if of_the_sdk:  # streams, and calls with options of their own
            http_pools.client.post(server.root, content=body)
        else:
            kept.post(there, body)

    post(b"1")
    child = os.fork()
    if child == 0:
        try:
            post(b"2")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    post(b"3")
    assert connections(server) == [0, 1, 0]


def test_tls(client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    with RawServer(tls=context) as server:
        http_post._tls.cache_clear()
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            client.post(server.root)
        http_post._tls.cache_clear()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        assert client.post(server.root)["model"] == "m@1"
        client.post(server.root)
        assert len(set(connections(server))) == 1
        with pytest.raises(OSError, match="certificate is not valid for"):
            client.post(server.root.replace("localhost", "127.0.0.1"))
    http_post._tls.cache_clear()
