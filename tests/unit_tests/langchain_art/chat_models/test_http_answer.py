"""The parser of answers against `http.client`, on random answers in random pieces."""

import io
from http.client import HTTPResponse
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.chat_models.http_pools import httpx
from langchain_art.chat_models.http_post import AnswerParser

REQUEST = httpx.Request("POST", "http://localhost/v1")
NAMES = st.text("abcdefgh-", min_size=1, max_size=8).map(lambda name: f"x-{name}")
VALUES = st.text("abc 123;=/", max_size=12).map(str.strip)


class _Socket:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def parsed(pieces: list[bytes], closed: bool) -> AnswerParser:
    parser = AnswerParser()
    for piece in [*filter(None, pieces), *([b""] if closed else [])]:
        parser.feed(piece)
    return parser


@given(
    st.sampled_from([200, 201, 301, 400, 404, 429, 500, 503]),
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.lists(st.binary(min_size=1, max_size=300), max_size=4),
    st.sampled_from(["length", "chunked", "close"]),
    st.booleans(),
    st.data(),
)
def test_as_http_client_reads_it(
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

    wanted = HTTPResponse(cast(Any, _Socket(whole)), method="POST")
    wanted.begin()
    content = wanted.read()
    parser = parsed(pieces, closed=framing == "close")
    assert parser.is_complete
    assert parser.keeps_connection == (keep and framing != "close") == (not wanted.will_close)
    answer = parser.answer(REQUEST)
    assert (answer.status, answer.content) == (wanted.status, content)
    told_back = [(name.decode(), value.decode()) for name, value in answer.raw_headers]
    assert told_back == wanted.getheaders()


@given(st.integers(0, 60))
def test_a_cut_answer_is_no_answer(length: int) -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 22\r\n\r\n" + b"x" * 22
    parser = AnswerParser()
    if cut := whole[: min(length, len(whole) - 1)]:
        parser.feed(cut)
    with pytest.raises(ConnectionError, match="closed the connection"):
        parser.feed(b"")


def test_what_follows_an_answer_ends_its_connection() -> None:
    one = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n1"
    for more in (one.replace(b"200", b"500"), b"noise"):
        parser = AnswerParser()
        parser.feed(one + more)
        assert parser.is_complete and not parser.keeps_connection
        answer = parser.answer(REQUEST)
        assert (answer.status, answer.content) == (200, b"1")
