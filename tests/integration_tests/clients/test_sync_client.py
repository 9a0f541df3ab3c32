import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
    RequestRefused,
    UnknownModel,
)
from langchain_art.wire import JobEvent, PolicyStatus
from langchain_art.wire.base_urls import split_base_url
from tests.support.raw_server import RawServer, answer

POLICY = {"name": "p", "version": 3, "lora": {}, "checkpoints": 4}
JOB: dict[str, Any] = {"id": "j", "key": "k", "policy": "p", "created_at": 1.0}


@pytest.fixture
def server() -> Iterator[RawServer]:
    with RawServer() as server:
        yield server


def refuse(code: str, status: int, **headers: str) -> bytes:
    error = {"message": f"no: {code}", "type": "x", "code": code, "param": "name"}
    return answer({"error": error}, status, **headers)


def test_base_url_ends_with_v1_whatever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_base_url("http://a:1") == ("http://a:1/v1", "http://a:1")
    assert split_base_url("https://a/art/v1/") == ("https://a/art/v1", "https://a/art")
    monkeypatch.setenv("ART_BASE_URL", "http://env:9/v1")
    monkeypatch.setenv("ART_API_KEY", "from-the-environment")
    client = ArtClient()
    assert (client.base_url, client.api_key) == ("http://env:9/v1", "from-the-environment")
    assert ArtClient("http://b").base_url == "http://b/v1"
    assert "from-the-environment" not in repr(client)
    with pytest.raises(ConfigError, match="expected a URL such as"):
        ArtClient("localhost:8000")


def test_some_other_server_is_said_and_maps_by_status(server: RawServer) -> None:
    page = "<!DOCTYPE html>\n<html><head><title>Here</title>" + "<p>" * 1000
    kinds = {404: NotFound, 401: AuthenticationFailed, 409: Conflict, 422: InvalidRequest}
    kinds |= {500: RequestRefused, 302: RequestRefused, 200: ArtError}
    for status, kind in kinds.items():
        server.answers = [answer(page.encode(), status, content_type="text/html")]
        with ArtClient(server.base_url) as client, pytest.raises(kind) as caught:
            client.policy("p")
        said = str(caught.value)
        assert type(caught.value) is kind and str(status) in said and len(said) < 500
        if status in (200, 404):
            assert f"{server.base_url}/policies/p answered {status} with text/html" in said
            assert "Point base_url (or ART_BASE_URL) at one" in said
    server.answers = [answer({"detail": "Not Found"}, 404), answer({"surprise": 1})]
    with ArtClient(server.base_url) as client:
        with pytest.raises(NotFound, match="answered 404 with application/json"):
            client.policy("p")
        with pytest.raises(ArtError, match="same release"):
            client.policy("p")


RETRIED = {"overloaded", "rate_limit_exceeded", "engine_unavailable", "request_timeout"}


def test_each_code_of_the_wire_is_its_error(server: RawServer) -> None:
    codes = sorted(set(REFUSALS) - RETRIED)
    server.answers = [refuse(code, REFUSALS[code].status) for code in codes]
    for code in codes:
        with ArtClient(server.base_url) as client, pytest.raises(REFUSALS[code]) as caught:
            client.policy("p")
        assert type(caught.value) is REFUSALS[code]
        assert (str(caught.value), caught.value.param) == (f"no: {code}", "name")
    assert len(server.seen) == len(codes), "a refusal is not retried"


def test_busy_answers_are_retried_and_retry_after_is_honoured(
    server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [refuse("overloaded", 429, retry_after="0.3")]
    server.answers += [refuse("engine_unavailable", 503), answer(POLICY)]
    slept: list[float] = []
    monkeypatch.setattr("langchain_art.client.sync_client.time.sleep", slept.append)
    with ArtClient(server.base_url) as client:
        assert client.policy("p") == PolicyStatus.model_validate(POLICY)
    assert len(server.seen) == 3
    assert slept[0] == 0.3 and len(slept) == 2
    server.answers = [refuse("engine_unavailable", 503, retry_after="60")]
    with ArtClient(server.base_url, patience=5) as client, pytest.raises(EngineUnavailable):
        client.policy("p")
    assert len(slept) == 2, "it asked for more than there is patience"


async def test_the_async_twin_sends_retries_and_raises_alike(server: RawServer) -> None:
    server.answers = [refuse("overloaded", 429), answer(POLICY), refuse("model_not_found", 404)]
    async with AsyncArtClient(server.base_url, "k" * 16) as client:
        assert (await client.policy("p")).version == 3
        with pytest.raises(UnknownModel):
            await client.policy("q")
    names = [{name for name in dir(kind) if name[0] != "_"} for kind in (ArtClient, AsyncArtClient)]
    assert names[0] == names[1] > {"train", "wait", "close"}
    sent = [seen.headers["authorization"] for seen in server.seen]
    assert sent == [f"Bearer {'k' * 16}"] * 3


def test_paths_are_quoted(server: RawServer) -> None:
    server.answers = [refuse("not_found", 404)]
    with ArtClient(server.base_url) as client:
        with pytest.raises(NotFound):
            client.trajectory("a/../b?c")
        with pytest.raises(ConfigError, match="got the run 7, expected a run of"):
            client.audit(7)  # type: ignore[arg-type]
    assert server.seen[0].target == "/v1/trajectories/a%2F..%2Fb%3Fc"


def test_train_retries_under_one_key(server: RawServer) -> None:
    server.answers = [refuse("overloaded", 429), answer(JOB | {"state": "queued"})]
    with ArtClient(server.base_url) as client:
        client.train([["t-1"]], "p")
        with pytest.raises(ConfigError):
            client.train([], "p")
        with pytest.raises(ConfigError, match=r"^This cannot be trained on: rewards.run: got nan"):
            client.train([["run"]], "p", rewards={"run": float("nan")})
    keys = {seen.headers["idempotency-key"] for seen in server.seen}
    assert len(server.seen) == 2
    assert len(keys) == 1


def test_wait_tells_each_event_once_and_in_order(server: RawServer) -> None:
    result = {"policy": "p", "version": 4, "metrics": {}, "excluded": {}}

    def events(*seqs: int, more: bool = False) -> bytes:
        data = [{"seq": n, "at": 0.0, "message": str(n)} for n in seqs]
        return answer({"data": data, "last_id": str(seqs[-1]), "has_more": more})

    server.answers = [
        answer(JOB | {"state": "running"}),
        events(1, 2),
        answer(JOB | {"state": "succeeded", "result": result}),
        events(3, more=True),
        events(4),
        answer(JOB | {"state": "failed", "error": "loss is nan"}),
    ]
    heard: list[JobEvent] = []
    with ArtClient(server.base_url) as client:
        assert client.wait("j", heard.append).version == 4
        with pytest.raises(JobFailed, match="loss is nan"):
            client.wait("j")
    assert [event.seq for event in heard] == [1, 2, 3, 4]
    assert [seen.target for seen in server.seen if "events" in seen.target] == [
        "/v1/jobs/j/events?limit=1000&after=0",
        "/v1/jobs/j/events?limit=1000&after=2",
        "/v1/jobs/j/events?limit=1000&after=3",
    ]


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


def test_a_downloaded_adapter_appears_whole(server: RawServer, tmp_path: Path) -> None:
    data = archive({"./adapter_config.json": b"{}", "adapter_model.safetensors": b"xyz"})
    server.answers = [answer(data)]
    with ArtClient(server.base_url) as client:
        found = client.download_adapter("p", 3, tmp_path / "new" / "adapter")
        with pytest.raises(ConfigError, match="not empty"):
            client.download_adapter("p", 3, found)
    names = sorted(path.name for path in found.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    assert [path.name for path in found.parent.iterdir()] == ["adapter"], "nothing is left behind"


def test_an_archive_that_reaches_out_is_refused(server: RawServer, tmp_path: Path) -> None:
    for data in (
        archive({"../evil": b"x"}),
        archive({"/etc/evil": b"x"}),
        archive({"a/b": b"x"}),
        archive({"ok": b"x"}, link="/etc/passwd"),
        b"no archive",
        archive({"a": b"x" * 4096})[:1000],
    ):
        server.answers = [answer(data)]
        with ArtClient(server.base_url) as client, pytest.raises(ArtError, match="archive"):
            client.download_adapter("p", 3, tmp_path / "adapter")
        assert list(tmp_path.iterdir()) == []


def test_an_archive_that_grows_or_names_no_file_is_refused(tmp_path: Path) -> None:
    plain = archive({"adapter_config.json": b"{}" * 4096})
    bombs = [pack(plain) for pack in (gzip.compress, bz2.compress, lzma.compress)]
    holes = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40)}
    for headers in ({"path": "a\0b"}, holes):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            member = tarfile.TarInfo("a")
            member.pax_headers = headers
            tar.addfile(member)
        bombs.append(buffer.getvalue())
    (tmp_path / "out").mkdir()
    for number, packed in enumerate(bombs):
        (tmp_path / "a.tar").write_bytes(packed)
        with pytest.raises(ArtError, match="archive"):
            unpack(tmp_path / "a.tar", tmp_path / "out")
        assert not list((tmp_path / "out").iterdir()), number
