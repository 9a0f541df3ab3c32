"""Requests whose framing is wrong or doubtful: read as h11 reads them, or refused.

What two parsers cut differently smuggles a request past the one in front (RFC 9112, 11.2).
"""

import asyncio
import random
import re
from typing import Any

import h11
import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from langchain_art_server.gateway.http_protocol import DeadlineHttp
from tests.support.seeds import drawn_seed
from tests.support.soak import count

Sent = tuple[bytes, bytes, bytes]  # method, target and body
CHUNKED = b"5\r\nhello\r\n6;a=b\r\n world\r\n0\r\nX-T: 1\r\n\r\n"
HEAD = b"Host: a\r\nContent-Type: application/json\r\n"
SEEDS = [
    b"GET /a?b=c HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /b HTTP/1.1\r\n" + HEAD + b"Content-Length: 11\r\n\r\nhello world",
    b"POST /c HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    b"POST /d HTTP/1.1\r\n" + HEAD + b"Content-Length: 47\r\n\r\n"
    b"GET /smuggled HTTP/1.1\r\nHost: a\r\nX-Filler: ab\r\n",
]
PIECES = [
    *(b"\r", b"\n", b"\r\n", b"\r\r\n", b"\0", b" ", b"\t", b":", b";", b",", b"\x0b", b"\x80"),
    *(b"0", b"1", b"-", b"+", b"0x", b"ffffffffffffffff1", b"a", b'"', b"\r\n ", b"\r\n\t"),
    *(b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"content-length:11\r\n"),
    *(b"Content-Length : 5\r\n", b"Content-Length: 5, 5\r\n", b"Content-Length: +5\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n"),
    *(b"Transfer-Encoding: chunked, identity\r\n", b"Transfer-Encoding:\tchunked\r\n"),
    *(b"Transfer-Encoding: xchunked\r\n", b"Transfer_Encoding: chunked\r\n"),
    *(b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"0\r\n\r\n"),
    *(b"Expect: 100-continue\r\n", b"HTTP/1.0", b"HTTP/1.1", b"GET /x HTTP/1.1\r\nHost: b\r\n\r\n"),
]


def mutant(rng: random.Random) -> bytes:
    """Some requests, one after the other, with one to three changes."""
    data = b"".join(rng.choices(SEEDS, k=rng.randint(1, 3)))
    for _ in range(rng.randint(1, 3)):
        lines = [0] + [at + 2 for at in range(len(data)) if data[at : at + 2] == b"\r\n"]
        at = rng.choice(lines) if rng.random() < 0.5 else rng.randrange(len(data) + 1)
        cut = rng.choice([0, 0, 0, 1, 2, rng.randint(0, 20)])
        data = data[:at] + rng.choice([b"", *PIECES]) + data[at + cut :]
    return data


class Wire(asyncio.Transport):
    """A connection without a socket: answers are not read, and what comes is given at once."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.closed = False

    def write(self, data: Any) -> None: ...
    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


async def ours(data: bytes, rng: random.Random) -> list[Sent]:
    """The requests that reach the application whole, of bytes that come in pieces."""
    served = list[Sent]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        target = scope["raw_path"] + b"?" * bool(scope["query_string"]) + scope["query_string"]
        served.append((scope["method"].encode(), target, body))
        await PlainTextResponse("")(scope, receive, send)

    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
    state, wire = ServerState(), Wire()
    one = DeadlineHttp(config, state, {})
    one.connection_made(wire)
    cuts = sorted(rng.choices(range(len(data) + 1), k=rng.choice([0, 1, 5])))
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        if end > begin and not wire.closed:
            one.data_received(data[begin:end])
        for _ in range(20 if rng.random() < 0.5 else 1):
            await asyncio.sleep(0)
    for _ in range(200):
        await asyncio.sleep(0)
    one.connection_lost(rng.choice([None, ConnectionResetError()]))
    await asyncio.gather(*state.tasks)
    return served


def strictly(data: bytes) -> list[Sent]:
    """The requests that h11 reads, up to the first that is wrong.

    Two things are allowed that h11 does not take: empty lines before a request, and several spaces
    in its first line (RFC 9112, 2.2 and 3).
    """
    served = list[Sent]()
    while True:
        connection = h11.Connection(h11.SERVER)
        data = data.lstrip(b"\r\n")
        connection.receive_data(re.sub(rb"^([^ \r\n]+) +([^ \r\n]+) +HTTP", rb"\1 \2 HTTP", data))
        sent = [b"", b"", b""]
        try:
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    sent[:2] = event.method, event.target
                elif isinstance(event, h11.Data):
                    sent[2] += event.data
                else:
                    return served  # the request is not whole
        except h11.RemoteProtocolError:
            return served
        served.append((sent[0], sent[1], sent[2]))
        if connection.their_state is h11.MUST_CLOSE:
            return served
        data, _ = connection.trailing_data


@pytest.mark.soak("S7", MUTANTS := count(200, 20_000), "requests whose framing is changed")
@pytest.mark.timeout(count(300, 1800))
async def test_a_changed_framing_is_read_as_h11_reads_it_or_refused() -> None:
    rng, apart, whole = random.Random(drawn_seed()), list[Any](), 0
    for _ in range(MUTANTS):
        data = mutant(rng)
        here, there = await ours(data, rng), strictly(data)
        whole += bool(here)
        if here != there[: len(here)]:
            apart.append((data, here, there))
    assert not apart, (len(apart), apart[:5])
    assert whole > MUTANTS // 4
