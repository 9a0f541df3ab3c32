"""Versions of adapters in a bucket of a real S3 server: complete or absent, published once."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from langchain_art.errors import ConfigError, Damaged, EngineUnavailable
from langchain_art_server.backends.models.adapter_files import (
    CONFIG_FILE,
    MANIFEST,
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
    manifest_bytes,
)
from langchain_art_server.config import load_settings
from langchain_art_server.policies import adapter_objects
from langchain_art_server.policies.adapter_store import (
    ADAPTER_FILES,
    Absent,
    AdapterStore,
    VersionTaken,
)
from langchain_art_server.policies.mirrored_store import MirroredStore, open_adapters
from tests.support.faulty_proxy import FaultyProxy
from tests.support.live_server import TLS
from tests.support.s3_server import S3Server
from tests.support.seeds import drawn_seed

Open = Callable[[str], MirroredStore]


@pytest.fixture(autouse=True)
def environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return tmp_path.name


@pytest.fixture
def disk(tmp_path: Path, prefix: str) -> Open:
    """Opens the store of a server, whose disk has this name."""

    def opened(name: str) -> MirroredStore:
        root = tmp_path / name / "adapters"
        store = open_adapters(root, S3Server.url(prefix), "adapters", shared=False)
        assert isinstance(store, MirroredStore)
        return store

    return opened


def staged(store: AdapterStore, content: bytes = b"weights") -> Path:
    path = store.stage()
    (path / CONFIG_FILE).write_text("{}")
    (path / WEIGHTS_FILE).write_bytes(content)
    (path / OPTIMIZER_FILE).write_bytes(content * 2)
    return path


def test_a_version_of_one_disk_is_read_on_another(disk: Open, s3: S3Server, prefix: str) -> None:
    """Its weights are of several parts, there and back; the optimizer comes when it is needed."""
    one, other = disk("one"), disk("other")
    weights = bytes(range(256)) * (80 << 10)  # 20 MiB
    one.publish(staged(one, weights), "agent", 1, {"job": "job-1"})
    assert other.versions("agent") == [1] and other.unused("agent") == 2
    other.check("agent", 1, ADAPTER_FILES)
    folder = other.path("agent", 1)
    assert (folder / WEIGHTS_FILE).read_bytes() == weights
    assert not (folder / OPTIMIZER_FILE).exists()
    inode = (folder / WEIGHTS_FILE).stat().st_ino
    manifest = other.manifest("agent", 1)
    assert manifest is not None and manifest["job"] == "job-1"
    assert (folder / OPTIMIZER_FILE).read_bytes() == weights * 2
    assert (folder / WEIGHTS_FILE).stat().st_ino == inode, "what is there stays"
    assert s3.answered("GET", prefix, WEIGHTS_FILE) == 3, "20 MiB are three parts, once"
    assert weights in other.archive("agent", 1)


def test_it_is_downloaded_once_for_all_who_ask(disk: Open, s3: S3Server, prefix: str) -> None:
    one, other = disk("one"), disk("other")
    one.publish(staged(one), "agent", 1, {"job": None})
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: other.check("agent", 1), range(32)))
    assert all(about == found[0] for about in found)
    assert s3.answered("GET", prefix, WEIGHTS_FILE) == 1


def test_one_of_two_publishes_a_version(disk: Open, s3: S3Server, prefix: str) -> None:
    one, other = disk("one"), disk("other")
    for version in range(4):
        begin, outcomes = threading.Barrier(2), list[str]()

        def publish(store: AdapterStore, name: str, number: int = version) -> None:
            made = staged(store, name.encode())
            begin.wait()  # noqa: B023 - of this round
            try:
                store.publish(made, "agent", number, {"job": name})
                outcomes.append(name)  # noqa: B023
            except VersionTaken:
                store.discard(made)

        threads = [
            threading.Thread(target=publish, args=(store, name))
            for store, name in ((one, "one"), (other, "other"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 1, outcomes
        for store in (one, other):
            assert store.check("agent", version)["job"] == outcomes[0]
            weights = (store.path("agent", version) / WEIGHTS_FILE).read_text()
            assert weights == outcomes[0], "nobody reads the other's files"
        uploads = {
            name.partition("/")[0] for name in s3.objects(f"{prefix}/adapters/agent/{version}")
        }
        assert len(uploads) == 2, "the manifest and one upload"


def test_a_deleted_version_is_gone_and_its_name_used(disk: Open, s3: S3Server, prefix: str) -> None:
    one, other = disk("one"), disk("other")
    for version in (0, 1, 2):
        one.publish(staged(one), "agent", version, {"job": None})
        other.check("agent", version)
    one.delete("agent", 2)
    other.delete("agent", 1)
    with pytest.raises(Absent, match=r"agent@2 is not in s3://adapters/.*roll back"):
        other.check("agent", 2)
    assert one.versions("agent") == other.versions("agent") == [0]
    assert one.unused("agent") == other.unused("agent") == disk("third").unused("agent") == 3
    late = staged(other)
    with pytest.raises(VersionTaken, match="agent@2 exists, or was deleted"):
        other.publish(late, "agent", 2, {"job": "late"})
    names = set(s3.objects(f"{prefix}/adapters"))
    assert {one for one in names if one.startswith(".deleted")} == {".deleted/agent/2"}
    assert {one.split("/")[1] for one in names if one.startswith("agent")} == {"0"}


def test_a_copy_is_of_the_version_that_has_its_name_now(disk: Open) -> None:
    """Version 0 of a policy that was deleted and made again is another one."""
    one, other = disk("one"), disk("other")
    for content in (b"former", b"newer"):
        one.publish(staged(one, content), "agent", 0, {"job": content.decode()})
        assert other.check("agent", 0)["job"] == content.decode()
        assert (other.path("agent", 0) / WEIGHTS_FILE).read_bytes() == content
        one.delete("agent", 0)
    assert other.copies() == [("agent", 0)]
    other.drop_copy("agent", 0)
    other.drop_copy("agent", 0)
    assert other.copies() == [] and not list(
        (other.path("agent", 0).parents[1] / ".staging").iterdir()
    )


def test_a_disk_that_takes_no_copy_is_said(disk: Open) -> None:
    one, other = disk("one"), disk("other")
    one.publish(staged(one), "agent", 1, {"job": None})
    in_the_way = other.path("agent", 1).parent
    in_the_way.touch()
    with pytest.raises(
        EngineUnavailable, match=r"agent@1 could not be copied to .*Free disk space"
    ):
        other.check("agent", 1)
    in_the_way.unlink()
    assert other.is_whole("agent", 1)


def test_a_deletion_that_was_cut_is_ended_by_another(disk: Open, s3: S3Server, prefix: str) -> None:
    one, other = disk("one"), disk("other")
    one.publish(staged(one), "agent", 1, {"job": None})
    one.announce("agent", 1)
    one.announce("agent", 7)  # there is none
    s3.delete(f"{prefix}/adapters/agent/1", MANIFEST)  # and then it was killed
    assert other.versions("agent") == [] and not other.is_whole("agent", 1)
    assert other.announced() == [("agent", 1)]
    other.delete("agent", 1)
    assert not s3.objects(f"{prefix}/adapters/agent") and other.announced() == []
    assert one.unused("agent") == 2


def test_what_nobody_publishes_is_swept(
    disk: Open, s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt at a version goes when another is published; of other versions, after a day."""
    store, place = disk("one"), f"{prefix}/adapters"
    left = "f" * 64
    for version in (1, 2):
        s3.put(place, f"agent/{version}/{left}/{WEIGHTS_FILE}", b"half")
    store.publish(staged(store), "agent", 1, {"job": None})
    names = s3.objects(place)
    assert f"agent/1/{left}/{WEIGHTS_FILE}" not in names
    assert f"agent/2/{left}/{WEIGHTS_FILE}" in names, "somebody may be making it"
    monkeypatch.setattr(adapter_objects, "LEFT_AFTER", timedelta(0))
    disk("two").adopt([], "db")
    assert f"agent/2/{left}/{WEIGHTS_FILE}" not in s3.objects(place)
    assert store.is_whole("agent", 1)


def test_what_is_not_what_was_published_is_refused(disk: Open, s3: S3Server, prefix: str) -> None:
    one, place = disk("one"), f"{prefix}/adapters/agent/1"
    one.publish(staged(one), "agent", 1, {"job": None})
    right = s3.objects(place)
    upload = next(name for name in right if name.endswith(WEIGHTS_FILE))
    outside = {"files": {"../../escaped": "0" * 64}}
    wrong = {
        "another SHA-256": (upload, b"weighty"),
        "is missing in": (upload, None),
        "is not what was written": (MANIFEST, right[MANIFEST].replace(b"{", b"{ ", 1)),
        "cannot be read": (MANIFEST, b""),
        "its manifest has a file": (MANIFEST, manifest_bytes(outside)),
    }
    for number, (words, (name, content)) in enumerate(wrong.items()):
        other = disk(f"other-{number}")
        if content is None:
            s3.delete(place, name)
        else:
            s3.put(place, name, content)
        with pytest.raises(Damaged, match=f"{words}.*Put it back into s3://"):
            other.check("agent", 1)
        assert not other.is_whole("agent", 1) and other.copies() == []
        s3.put(place, name, right[name])
        assert other.is_whole("agent", 1), "it was put back"
    for name in (WEIGHTS_FILE, MANIFEST):
        (other.path("agent", 1) / name).write_bytes(b"the disk has changed it")
        assert other.check("agent", 1), "a damaged copy is downloaded again"
    (other.path("agent", 1) / WEIGHTS_FILE).unlink()
    (other.path("agent", 1) / WEIGHTS_FILE).symlink_to("/dev/zero")
    assert other.check("agent", 1) and not (other.path("agent", 1) / WEIGHTS_FILE).is_symlink()


def test_a_store_of_before_moves_into_the_bucket(
    tmp_path: Path, disk: Open, s3: S3Server, prefix: str
) -> None:
    """What the database names is uploaded at the start, and the numbers of deleted versions are."""
    before = AdapterStore(tmp_path / "one" / "adapters", shared=True)
    for version in (0, 1, 2, 3):
        before.publish(staged(before), "agent", version, {"job": None})
    before.delete("agent", 3)
    (before.path("agent", 1) / WEIGHTS_FILE).write_bytes(b"damaged")
    one, other = disk("one"), disk("other")
    one.adopt([("agent", 0), ("agent", 1), ("agent", 2), ("agent", 9)], "db")
    assert other.versions("agent") == [0, 2], "what is damaged stays where it is"
    assert other.is_whole("agent", 0) and other.unused("agent") == 4
    other.adopt([("agent", 0), ("agent", 2)], "db")
    assert one.versions("agent") == [0, 2]
    with pytest.raises(ConfigError, match=r"copies of the versions in s3://.*is not set"):
        open_adapters(tmp_path / "one" / "adapters", None, "adapters", shared=True)
    with pytest.raises(ConfigError, match="adapters_url is 's3://adapters/other'"):
        open_adapters(tmp_path / "one" / "adapters", "s3://adapters/other", "adapters", shared=True)


class _Unconditional(BaseHTTPRequestHandler):
    """A store that does not know conditional writes, in front of one that does."""

    endpoint = ""

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        left = ("if-none-match", "host", "content-length")
        headers = {name: one for name, one in self.headers.items() if name.lower() not in left}
        url = self.endpoint + self.path
        answer = httpx.request(self.command, url, content=body, headers=headers, verify=TLS)
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(answer.content)))
        for name in ("ETag", "Last-Modified"):
            if name in answer.headers:
                self.send_header(name, answer.headers[name])
        self.end_headers()
        self.wfile.write(answer.content)

    do_GET = do_PUT = do_POST = do_DELETE = _pass_on

    def log_message(self, format: str, *args: object) -> None:
        """Not on standard error."""


def test_a_store_without_conditional_writes_is_refused(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Unconditional, "endpoint", s3.endpoint)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Unconditional) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        try:
            with pytest.raises(ConfigError, match="a store that writes over an object which"):
                open_adapters(tmp_path, "s3://adapters/x", "adapters", shared=False)
        finally:
            server.shutdown()
            thread.join()


def test_a_folder_is_a_store_as_well(tmp_path: Path) -> None:
    url = (tmp_path / "shared").as_uri()
    (tmp_path / "shared").mkdir()
    one, other = (
        open_adapters(tmp_path / name / "adapters", url, "adapters", shared=False)
        for name in ("one", "other")
    )
    one.publish(staged(one), "agent", 0, {"job": None})
    with pytest.raises(VersionTaken):
        other.publish(staged(other), "agent", 0, {"job": None})
    assert other.is_whole("agent", 0)
    other.delete("agent", 0)
    assert one.versions("agent") == [] and one.unused("agent") == 1


@pytest.mark.slow
def test_a_network_that_loses_answers_loses_no_version(
    disk: Open, s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are torn and answers lost: each version is published once, or the error is said."""
    monkeypatch.setattr(adapter_objects, "REQUEST_SECONDS", 2)
    other = disk("other")
    with FaultyProxy(s3.port, drawn_seed()) as network:
        monkeypatch.setenv("AWS_ENDPOINT_URL", network.root)
        numbers, faulty = itertools.count(), None
        while faulty is None:
            try:
                faulty = disk(f"faulty-{next(numbers)}")
            except ConfigError as error:
                assert "cannot be used" in str(error)
        outcomes = Counter[str]()
        for version in range(12):
            content = str(version).encode() * 1000
            try:
                faulty.publish(staged(faulty, content), "agent", version, {"job": str(version)})
                outcomes["published"] += 1
                assert other.check("agent", version)["job"] == str(version)
            except EngineUnavailable as error:
                assert "Send the request again" in str(error)
                outcomes["unknown"] += 1
            except VersionTaken:
                outcomes["torn"] += 1
            written = s3.objects(f"{prefix}/adapters/agent/{version}").get(MANIFEST)
            # moto keeps what has come of a torn request; S3 knows its digest, and refuses it.
            if written is not None and written.endswith(b"\n}"):
                assert other.is_whole("agent", version), "complete or absent"
            else:
                assert not other.is_whole("agent", version)
        assert network.met["lost answer"] and network.met["torn request"]
    assert outcomes["published"] > outcomes["torn"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://nowhere/x", "NoSuchBucket.*Expected a bucket that is there, and credentials"),
        ("az://container/x", "cannot be used: .*Account must be specified"),
        ("file:///no/such/folder", "cannot be used: .*/no/such/folder"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_said_at_the_start(
    tmp_path: Path, url: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"got adapters_url='{url}'.*{words}"):
        open_adapters(tmp_path, url, "adapters", shared=False)
    assert not list(tmp_path.iterdir())


def test_credentials_that_are_refused_are_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Server(tmp_path, requests_without_rights=1) as strict:
        monkeypatch.setenv("AWS_ENDPOINT_URL", strict.endpoint)
        with pytest.raises(ConfigError, match=r"InvalidAccessKeyId.*AWS_ACCESS_KEY_ID") as refused:
            open_adapters(tmp_path / "data", strict.url("x"), "adapters", shared=False)
    assert "tests" not in str(refused.value), "no secret is said"


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, adapter_objects.__name__)
    with pytest.raises(ConfigError, match=r'pip install "langchain-art\[objects\]"'):
        open_adapters(tmp_path, "s3://adapters/x", "adapters", shared=False)


@pytest.mark.parametrize(
    "url", ["ftp://x/y", "s3:bucket", "s3://", "memory:///", "s3://key:secret@bucket", "data"]
)
def test_a_url_of_no_known_store_is_refused(url: str) -> None:
    fleet = {"fleet": True, "database_url": "postgresql://db/art"}
    with pytest.raises(ConfigError, match="expected s3://BUCKET/PREFIX, gs://"):
        load_settings(model="none", adapters_url=url, **fleet)
    with pytest.raises(ConfigError, match="adapters_url='s3://b/p' without fleet=true"):
        load_settings(model="none", adapters_url="s3://b/p")
    known = load_settings(model="none", adapters_url="s3://bucket/a/b", **fleet)
    assert known.adapters_url == "s3://bucket/a/b"
