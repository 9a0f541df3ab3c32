"""Requests that are wrong by little: a valid one, mutated at places that a seed chooses."""

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

#: What any place of a body, a path or a query may be replaced by.
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63 - 1, -(2**63), 2**64, 10**40),
    *(0.5, -0.0, 1e308, -1e308, 5e-324),
    *("", " ", "\x00", "a\x00b", "\ud800", "null", "1_0", "NaN", "é" * 200, "x" * 5000),
    *("../../etc/passwd", "%00", "{{ 7 * 7 }}", "'; DROP TABLE calls; --"),
    *([], [None], [[]], [{}], ["x"] * 300),
    *({}, {"": None}, {"$ref": "#"}, {"type": "object"}, {"const": -(2**63)}),
]
#: Characters of a value in a URL: httpx sends no URL of more than 65,536.
_LONGEST = 6000
HEADERS = [
    ("x-art-trajectory-id", "run-1"),
    ("x-art-node", "a/b"),
    ("x-art-tags", ",,,"),
    ("x-art-attempt", "-1"),
    ("x-stainless-retry-count", "99999999999"),
    ("Idempotency-Key", ""),
    ("Idempotency-Key", "x" * 500),
    ("Content-Type", "text/plain"),
    ("Accept", "\xff"),
]


@dataclass(frozen=True)
class Valid:
    """A request that the server answers: `path` is a template of the OpenAPI document."""

    method: str
    path: str
    names: dict[str, Any] = field(default_factory=dict[str, Any])
    query: dict[str, Any] = field(default_factory=dict[str, Any])
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Sent:
    """A request to send, and the template of its path."""

    method: str
    path: str
    url: str
    content: bytes
    headers: list[tuple[str, str]]


def mutants(valid: list[Valid], seed: int, count: int) -> Iterator[Sent]:
    """So many requests, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield _mutant(rng.choice(valid), rng)


def _mutant(one: Valid, rng: random.Random) -> Sent:
    one = copy.deepcopy(one)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        parts = [part for part in (one.names, one.query) if part]
        if one.body is not None:
            parts += [one.body] * 6
        if parts:
            _mutate(rng.choice(parts), rng)
    sent = sent_as_is(one)
    if sent.content and rng.random() < 0.08:
        sent = replace(sent, content=_torn(sent.content, rng))
    if rng.random() < 0.1:
        name, value = rng.choice(HEADERS)
        sent = replace(sent, headers=list((dict(sent.headers) | {name: value}).items()))
    return sent


def sent_as_is(one: Valid) -> Sent:
    url = one.path
    for name, value in one.names.items():
        url = url.replace(f"{{{name}}}", _quoted(value))
    if one.query:
        url += "?" + "&".join(f"{name}={_quoted(value)}" for name, value in one.query.items())
    content, headers = b"", dict(one.headers)
    if one.body is not None:
        content, headers["Content-Type"] = json.dumps(one.body).encode(), "application/json"
    return Sent(one.method, one.path, url, content, list(headers.items()))


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return quote(text[:_LONGEST], safe="", errors="surrogatepass")


def _mutate(root: Any, rng: random.Random) -> None:
    """Change one place anywhere below a list or an object."""
    found = list(places(root))
    if not found:
        return
    parent, key = rng.choice(found)
    kind = rng.random()
    if kind < 0.6:
        parent[key] = copy.deepcopy(rng.choice(HOSTILE))
    elif kind < 0.75:
        del parent[key]
    elif kind < 0.85:
        value, other = parent[key], rng.choice(found)
        other[0][other[1]] = copy.deepcopy(value)
    elif isinstance(parent, dict):
        name = rng.choice(["x", "model", "id", "messages", "type", "n", ""])
        parent[name] = copy.deepcopy(rng.choice(HOSTILE))
    else:
        parent += [copy.deepcopy(parent[key])] * rng.choice((1, 20))


def places(root: Any) -> Iterator[tuple[Any, Any]]:
    """Parent and key of all below a list or an object."""
    if root is None:
        return
    keys = list(root) if isinstance(root, dict) else range(len(root))
    for key in keys:
        yield root, key
        if isinstance(root[key], dict | list):
            yield from places(root[key])


def _torn(content: bytes, rng: random.Random) -> bytes:
    """Bytes that are not the JSON that they were."""
    at = rng.randrange(len(content))
    return rng.choice(
        [
            content[:at],
            content[:at] + rng.randbytes(3) + content[at:],
            content.replace(b'"', b"'", 2),
            content + content,
            b"[" * 3000 + content,
            content.replace(b":", b': NaN, "x":', 1),
        ]
    )
