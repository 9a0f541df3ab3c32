"""What a hostile client sends: each attack is a coroutine that goes on until it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "When is the falcon review?"}]
LOWEST = -(2**63)
#: The attacker that does nothing.
CONTROL = "none: control"
MB = 1 << 20


@dataclass(frozen=True)
class Target:
    """The server, and the key that most attackers have."""

    port: int
    key: str

    def head(self, method: str, path: str, length: int, key: str | None = None) -> bytes:
        return (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            f"Authorization: Bearer {self.key if key is None else key}\r\n"
            f"Idempotency-Key: attack-{next(_numbers)}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # From another address than the innocent client's: the server shares by address.
        here = ("127.0.0.2", 0)
        return await asyncio.open_connection("127.0.0.1", self.port, limit=64 * MB, local_addr=here)

    async def send(
        self, method: str, path: str, body: bytes = b"", key: str | None = None
    ) -> int | None:
        """One request; its answer's status, or None if the server closed the connection."""
        reader, writer = await self.connect()
        try:
            writer.write(self.head(method, path, len(body), key))
            writer.write(body)
            head = await reader.readuntil(b"\r\n\r\n")
            while await reader.read(MB):
                if b"content-length" in head.lower():
                    break
            return int(head.split(b" ", 2)[1])
        except (OSError, asyncio.IncompleteReadError):
            return None
        finally:
            writer.close()


Attack = Callable[[Target], Awaitable[None]]
_numbers = itertools.count()
_statuses: dict[int | None, int] = {}


def statuses() -> dict[str, int]:
    """How often each status was the answer, in this process."""
    return {str(status): count for status, count in _statuses.items()}


def _note(status: int | None) -> None:
    _statuses[status] = _statuses.get(status, 0) + 1


def again(method: str, path: str, body: Any, *, key: str | None = None, at_once: int = 1) -> Attack:
    """The same request, `at_once` of them, each sent again as soon as it is answered."""

    async def attack(target: Target) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def one() -> None:
            while True:
                _note(await target.send(method, path, data, key))
                await asyncio.sleep(0.005)

        await asyncio.gather(*(one() for _ in range(at_once)))

    return attack


def chat(at_once: int = 1, **body: Any) -> Attack:
    asked = {"model": "base_model", "messages": ASK, "max_tokens": 16} | body
    return again("POST", CHAT, asked, at_once=at_once)


def schema(found: Any) -> Attack:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": found}}
    return chat(response_format=asked)


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def nested(depth: int) -> Any:
    found: Any = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}}
    return found


def connections(
    count: int, use: Callable[[Target, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> Attack:
    """So many connections at once; one that was used, or closed by the server, is opened again."""

    async def attack(target: Target) -> None:
        async def one() -> None:
            while True:
                reader, writer = await target.connect()
                try:
                    await use(target, reader, writer)
                except OSError:
                    _note(None)
                finally:
                    writer.close()
                await asyncio.sleep(0.1)

        await asyncio.gather(*(one() for _ in range(count)))

    return attack


async def short_headers(
    _target: Target, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Many short headers, without a key."""
    writer.write(b"GET /healthz HTTP/1.1\r\n")
    for number in range(200_000):
        writer.write(b"a: %d\r\n" % number)
        if number % 500 == 0:
            await writer.drain()


def slow(drip: bytes) -> Attack:
    """500 connections that send nothing whole: idle, or at times another byte of `drip`."""

    async def use(
        _target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(drip)
        while not reader.at_eof():
            writer.write(drip[:1])
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`, which loses a cancellation at times (Python 3.11).
                async with asyncio.timeout(1):
                    await reader.read(1)

    return connections(500, use)


def unfinished_body(
    path: str,
) -> Callable[[Target, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A body of 30 MB whose last byte never comes."""

    async def use(
        target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(target.head("POST", path, 30 * MB))
        for size in [MB] * 29 + [MB - 1]:
            writer.write(bytes(size))
            await writer.drain()
        await reader.read(1)

    return use


async def unread_streams(
    target: Target, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Long streams that are never read."""
    body = {"model": "base_model", "messages": ASK, "n": 16, "stream": True, "logprobs": True}
    data = json.dumps(body | {"top_logprobs": 20, "max_tokens": 1500}).encode()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(target.head("POST", CHAT, len(data)) + data)
    await writer.wait_closed()


async def nothing(_target: Target) -> None:
    """A client that does nothing."""
    await asyncio.Event().wait()


async def policies(target: Target) -> None:
    """Policies of the highest rank, one after the other."""
    while True:
        spec = {"name": f"hostile-{next(_numbers)}", "lora": {"rank": 512}}
        _note(await target.send("POST", "/v1/policies", json.dumps(spec).encode()))
        await asyncio.sleep(0.005)


def attacks() -> dict[str, Attack]:
    """All of them, by name."""
    ids = [f"run-{number}" for number in range(32_000)]
    call = {"id": "c", "type": "function", "function": {"name": "x", "arguments": "{}"}}
    long_call = call | {"function": {"name": "x", "arguments": json.dumps({"a": "x" * 4 * MB})}}
    properties = {f"p{number}": {"type": "string"} for number in range(20_000)}
    group = {"id": "g", "trajectories": [{"id": "t", "turns": [], "metadata": {"x": "y" * 8 * MB}}]}
    return {
        CONTROL: nothing,
        "top_k of 63 bits": chat(top_k=2**63 - 1),
        "seed of 80 bits": chat(seed=2**80),
        "max_tokens of 63 bits": chat(max_tokens=2**63 - 1),
        "lowest integer as const": schema({"const": LOWEST}),
        "lowest integer in an enum": schema({"enum": [LOWEST]}),
        "lowest integer as both bounds": schema(
            {"type": "integer", "minimum": LOWEST, "maximum": LOWEST}
        ),
        "lowest integer in a property": schema(
            {"type": "object", "properties": {"a": {"const": LOWEST + 1}}, "required": ["a"]}
        ),
        "schema that refers to itself": schema({"$ref": "#"}),
        "schema of 300 levels": schema(nested(300)),
        "20 patterns at once": schema(
            {"type": "string", "allOf": [{"pattern": f"^.*a.{{{n}}}b.*$"} for n in range(40, 60)]}
        ),
        "enum of 300,000": schema({"enum": [f"value {number}" for number in range(300_000)]}),
        "object of 20,000 properties": schema({"type": "object", "properties": properties}),
        "array of a million items": schema(
            {"type": "array", "items": {"type": "string"}, "minItems": 10**6}
        ),
        "100,000 stop strings": chat(stop=[f"stop {number}" for number in range(100_000)]),
        "prompt of 8 MB": chat(messages=said("x y " * 2 * MB)),
        "prompt of 30 MB": chat(messages=said("x y " * (15 * MB // 2))),
        "4,096 messages": chat(messages=said("x y " * 500) * 4096),
        "tool of 20 MB": chat(tools=[tool("x", description="a b " * 5 * MB)]),
        "256 tools": chat(
            tools=[tool(f"x{n}", description="a b " * 2000, parameters={}) for n in range(256)]
        ),
        "tool call of 4 MB": chat(
            messages=[*ASK, {"role": "assistant", "content": None, "tool_calls": [long_call]}]
        ),
        "body of 100,000 levels": again("POST", CHAT, b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        "16 choices with top_logprobs": chat(n=16, logprobs=True, top_logprobs=20, max_tokens=200),
        "64 clients that do not read": connections(64, unread_streams),
        "32,000 ids with one twice": again(
            "POST", "/v1/train", {"policy": "tiny", "groups": [[*ids, ids[0]]]}
        ),
        "group of 8 MB": again("POST", "/v1/groups", group),
        "policies of rank 512": policies,
        "1,000 trajectories": again("GET", "/v1/trajectories?limit=1000", b"", at_once=4),
        "100 MB of short headers": connections(1, short_headers),
        "500 idle connections": slow(b""),
        "500 slow headers": slow(b"GET / HTTP/1.1\r\nHost: x\r\na: "),
        "30 unfinished bodies of 30 MB": connections(30, unfinished_body(CHAT)),
        "30 unfinished groups of 30 MB": connections(30, unfinished_body("/v1/groups")),
        "wrong keys": again("GET", "/status", b"", key="wrong", at_once=32),
    }
