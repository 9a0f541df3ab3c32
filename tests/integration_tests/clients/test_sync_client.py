import asyncio
import bz2
import contextlib
import gzip
import io
import json
import lzma
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.endpoints import unpack
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import (
    REFUSALS,
    ArtError,
    AuthenticationFailed,
    ConfigError,
    Conflict,
    EngineUnavailable,
    InvalidRequest,
    JobFailed,
    NotFound,
    Overloaded,
    RequestRefused,
    ServerUnreachable,
    UnknownModel,
)
from langchain_art.wire import JobEvent, PolicyStatus
from langchain_art.wire.base_urls import split_base_url
from tests.support.live_server import LiveServer, free_port

POLICY = {"name": "p", "version": 3, "lora": {}, "checkpoints": 4}
JOB = {"id": "j", "key": "k", "policy": "p", "created_at": 1.0}

Answer = Callable[[Request], Response]


class Scripted:
    """A server on loopback that gives the answers it was told to give, in order."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        app = Starlette(
            routes=[
                Route("/{path:path}", self._serve, methods=["GET", "POST", "PUT", "DELETE"]),
            ]
        )
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._thread.start()

    async def _serve(self, request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        url = request.scope["raw_path"].decode() + query
        self.seen.append((request.method, url, dict(request.headers), await request.body()))
        return self.answers.pop(0)(request) if self.answers else JSONResponse(POLICY)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.stop()


def refuse(code: str, status: int, retry_after: str | None = None) -> Answer:
    body = {"error": {"message": f"no: {code}", "type": "x", "code": code, "param": "name"}}
    headers = {"retry-after": retry_after} if retry_after else None
    return lambda _: JSONResponse(body, status_code=status, headers=headers)


def give(body: Any) -> Answer:
    return lambda _: JSONResponse(body)


def test_base_url_ends_with_v1_whatever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_base_url("http://a:1") == ("http://a:1/v1", "http://a:1")
    assert split_base_url("https://a/art/v1/") == ("https://a/art/v1", "https://a/art")
    monkeypatch.setenv("ART_BASE_URL", "http://env:9/v1")
    monkeypatch.setenv("ART_API_KEY", "from-the-environment")
    client = ArtClient()
    assert (client.base_url, client.api_key) == ("http://env:9/v1", "from-the-environment")
    assert ArtClient("http://b").base_url == "http://b/v1"


def test_some_other_server_is_said(server: Scripted) -> None:
    page = "<!DOCTYPE html>\n<html><head><title>Here</title>" + "<p>" * 1000
    server.answers = [
        lambda _: HTMLResponse(page, status_code=404),
        lambda _: HTMLResponse(page),
        lambda _: JSONResponse({"detail": "Not Found"}, status_code=404),
    ]
    for status, kind in ((404, "text/html"), (200, "text/html"), (404, "application/json")):
        with pytest.raises(ArtError) as caught:
            ArtClient(server.base_url).policy("p")
        said = str(caught.value)
        assert f"{server.base_url}/policies/p answered {status} with {kind}" in said
        assert "Point base_url (or ART_BASE_URL) at one" in said and len(said) < 500


def test_a_base_url_without_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a URL such as"):
        ArtClient("localhost:8000")


def test_the_key_never_shows_in_repr() -> None:
    assert "secret" not in repr(ArtClient("http://a", "secret-secret-secret"))


RETRIED = {"overloaded", "rate_limit_exceeded", "engine_unavailable", "request_timeout"}


@pytest.mark.parametrize("code", sorted(set(REFUSALS) - RETRIED))
def test_each_code_of_the_wire_is_its_error(server: Scripted, code: str) -> None:
    server.answers = [refuse(code, REFUSALS[code].status)]
    with ArtClient(server.base_url) as client, pytest.raises(REFUSALS[code]) as caught:
        client.policy("p")
    assert type(caught.value) is REFUSALS[code]
    assert str(caught.value) == f"no: {code}"
    assert caught.value.param == "name"
    assert len(server.seen) == 1, "a refusal is not retried"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, AuthenticationFailed),
        (404, NotFound),
        (409, Conflict),
        (422, InvalidRequest),
        (500, RequestRefused),
        (302, RequestRefused),
    ],
)
def test_an_answer_that_is_not_ours_maps_by_status(
    server: Scripted, status: int, kind: type[ArtError]
) -> None:
    server.answers = [lambda _: Response("<html>what</html>", status_code=status)]
    with ArtClient(server.base_url) as client, pytest.raises(kind, match=str(status)) as caught:
        client.policy("p")
    assert type(caught.value) is kind


def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a synchronous client would have slept for."""
    slept: list[float] = []
    monkeypatch.setattr("langchain_art.client.sync_client.time.sleep", slept.append)
    return slept


def test_busy_answers_are_retried_and_retry_after_is_honoured(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [refuse("overloaded", 429, "0.3"), refuse("engine_unavailable", 503)]
    slept = pauses(monkeypatch)
    with ArtClient(server.base_url) as client:
        assert client.policy("p") == PolicyStatus.model_validate(POLICY)
    assert len(server.seen) == 3
    assert slept[0] == 0.3 and len(slept) == 2


def test_patience_ends_in_the_typed_refusal(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [refuse("overloaded", 429)] * 100
    with ArtClient(server.base_url, patience=0.5) as client, pytest.raises(Overloaded):
        client.policy("p")
    server.answers = [refuse("engine_unavailable", 503, "60")]
    slept = pauses(monkeypatch)
    with ArtClient(server.base_url, patience=5) as client, pytest.raises(EngineUnavailable):
        client.policy("p")
    assert not slept, "it asked for more than there is patience"


def test_nobody_there_is_unreachable_and_says_what_to_do() -> None:
    port = free_port()
    client = ArtClient(f"http://127.0.0.1:{port}/v1", patience=0.3)
    with client, pytest.raises(ServerUnreachable, match="langchain-art serve"):
        client.status()


def test_a_server_that_comes_back_is_found() -> None:
    port = free_port()

    def late() -> None:
        time.sleep(0.3)
        with socket.create_server(("127.0.0.1", port)) as listening:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                body = json.dumps(POLICY).encode()
                head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                connection.sendall(head + body)

    thread = threading.Thread(target=late)
    thread.start()
    with ArtClient(f"http://127.0.0.1:{port}/v1", patience=10) as client:
        assert client.policy("p").version == 3
    thread.join()


async def test_the_async_twin_sends_retries_and_raises_alike(server: Scripted) -> None:
    server.answers = [refuse("overloaded", 429), give(POLICY), refuse("model_not_found", 404)]
    async with AsyncArtClient(server.base_url, "k" * 16) as client:
        assert (await client.policy("p")).version == 3
        with pytest.raises(UnknownModel):
            await client.policy("q")
    sent = [headers["authorization"] for _, _, headers, _ in server.seen]
    assert sent == [f"Bearer {'k' * 16}"] * 3


def test_the_two_clients_have_the_same_methods() -> None:
    def names(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert names(ArtClient) == names(AsyncArtClient) > {"train", "wait", "close"}


def test_an_unknown_shape_is_said_not_shown_as_a_traceback(server: Scripted) -> None:
    server.answers = [give({"surprise": 1})]
    with ArtClient(server.base_url) as client, pytest.raises(ArtError, match="same release"):
        client.policy("p")


def test_paths_are_quoted(server: Scripted) -> None:
    server.answers = [refuse("not_found", 404)]
    with ArtClient(server.base_url) as client, pytest.raises(NotFound):
        client.trajectory("a/../b?c")
    assert server.seen[0][1] == "/v1/trajectories/a%2F..%2Fb%3Fc"


def test_train_retries_under_one_key(server: Scripted) -> None:
    server.answers = [refuse("overloaded", 429), give(JOB | {"state": "queued"})]
    with ArtClient(server.base_url) as client:
        client.train([["t-1"]], "p")
    keys = {headers["idempotency-key"] for _, _, headers, _ in server.seen}
    assert len(server.seen) == 2
    assert len(keys) == 1


def test_train_refuses_what_cannot_be_a_request() -> None:
    with ArtClient("http://127.0.0.1:9") as client, pytest.raises(ConfigError):
        client.train([], "p")


def test_wait_tells_each_event_once_and_in_order(server: Scripted) -> None:
    result = {"policy": "p", "version": 4, "metrics": {}, "excluded": {}}

    def events(*seqs: int, more: bool = False) -> Answer:
        data = [{"seq": n, "at": 0.0, "message": str(n)} for n in seqs]
        return give({"data": data, "last_id": str(seqs[-1]), "has_more": more})

    server.answers = [
        give(JOB | {"state": "running"}),
        events(1, 2),
        give(JOB | {"state": "succeeded", "result": result}),
        events(3, more=True),
        events(4),
    ]
    heard: list[JobEvent] = []
    with ArtClient(server.base_url) as client:
        assert client.wait("j", heard.append).version == 4
    assert [event.seq for event in heard] == [1, 2, 3, 4]
    assert [url for _, url, _, _ in server.seen if "events" in url] == [
        "/v1/jobs/j/events?limit=1000&after=0",
        "/v1/jobs/j/events?limit=1000&after=2",
        "/v1/jobs/j/events?limit=1000&after=3",
    ]


def test_a_failed_job_raises_the_servers_words(server: Scripted) -> None:
    server.answers = [give(JOB | {"state": "failed", "error": "loss is nan"})]
    with ArtClient(server.base_url) as client, pytest.raises(JobFailed, match="loss is nan"):
        client.wait("j")


def archive(members: dict[str, bytes], **links: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type = tarfile.SYMTYPE
            info.linkname = target
            tar.addfile(info)
    return buffer.getvalue()


def test_a_downloaded_adapter_appears_whole(server: Scripted, tmp_path: Path) -> None:
    data = archive({"adapter_config.json": b"{}", "adapter_model.safetensors": b"xyz"})
    server.answers = [lambda _: Response(data)]
    with ArtClient(server.base_url) as client:
        found = client.download_adapter("p", 3, tmp_path / "new" / "adapter")
    names = sorted(path.name for path in found.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    assert [path.name for path in found.parent.iterdir()] == ["adapter"], "nothing is left behind"


@pytest.mark.parametrize(
    "data",
    [
        archive({"../evil": b"x"}),
        archive({"/etc/evil": b"x"}),
        archive({"a/b": b"x"}),
        archive({"ok": b"x"}, link="/etc/passwd"),
        b"no archive",
        archive({"a": b"x" * 4096})[:1000],
    ],
)
def test_an_archive_that_reaches_out_is_refused(
    server: Scripted, tmp_path: Path, data: bytes
) -> None:
    server.answers = [lambda _: Response(data)]
    with ArtClient(server.base_url) as client, pytest.raises(ArtError, match="archive"):
        client.download_adapter("p", 3, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_a_full_directory_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with ArtClient("http://127.0.0.1:9") as client, pytest.raises(ConfigError, match="not empty"):
        client.download_adapter("p", 3, tmp_path)


def test_unpack_keeps_names_with_a_leading_dot_slash(tmp_path: Path) -> None:
    packed = tmp_path / "a.tar"
    packed.write_bytes(archive({"./adapter_config.json": b"{}"}))
    (tmp_path / "out").mkdir()
    unpack(packed, tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").read_bytes() == b"{}"


def _bombs() -> Iterator[tuple[str, bytes]]:
    """Archives from which comes more than they are, or whose names no file may have."""
    plain = archive({"adapter_config.json": b"{}" * 4096})
    for pack in (gzip.compress, bz2.compress, lzma.compress):
        yield pack.__module__, pack(plain)
    pax = io.BytesIO()
    with tarfile.open(fileobj=pax, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a")
        member.pax_headers = {"path": "a\0b"}
        tar.addfile(member)
    yield "a NUL in a name", pax.getvalue()
    sparse = io.BytesIO()
    with tarfile.open(fileobj=sparse, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a")
        member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40)}
        tar.addfile(member)
    yield "holes", sparse.getvalue()


@pytest.mark.parametrize("packed", [pytest.param(one, id=name) for name, one in _bombs()])
def test_an_archive_that_grows_or_names_no_file_is_refused(tmp_path: Path, packed: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(packed)
    (tmp_path / "out").mkdir()
    with pytest.raises(ArtError, match="archive"):
        unpack(tmp_path / "a.tar", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


# --- against the real server ------------------------------------------------------------------


def test_policies_and_checkpoints_of_a_real_server(art_server: LiveServer, tmp_path: Path) -> None:
    with ArtClient(art_server.base_url, art_server.api_key) as client:
        client.ready(30)
        made = client.create_policy("client-test")
        assert client.create_policy("client-test") == made
        assert made in client.policies()
        assert "client-test@0" in client.models()
        [first] = client.checkpoints("client-test")
        assert (first.name, first.serving) == ("client-test@0", True)
        assert client.pin("client-test", 0).pinned
        assert not client.unpin("client-test", 0).pinned
        assert client.rollback("client-test", 0).version == 0
        with pytest.raises(InvalidRequest, match="serves now"):
            client.delete_checkpoint("client-test", 0)
        with pytest.raises(NotFound):
            client.policy("nobody")
        path = client.download_adapter("client-test", 0, tmp_path / "adapter")
        assert (path / "adapter_model.safetensors").stat().st_size > 0


async def test_async_client_talks_to_the_real_server(art_server: LiveServer) -> None:
    async with AsyncArtClient(art_server.base_url, art_server.api_key) as client:
        statuses = await asyncio.gather(*(client.status() for _ in range(8)))
        assert all(status.ready for status in statuses)
        with contextlib.suppress(NotFound):
            await client.call("chatcmpl-none")
