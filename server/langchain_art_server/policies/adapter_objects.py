"""Versions of adapters in an object store: a version is complete or absent, and published once.

| object | what it is |
|---|---|
| ``POLICY/N/UPLOAD/FILE`` | a file; UPLOAD is the SHA-256 that its manifest has of itself |
| ``POLICY/N/manifest.json`` | written last, and only if there is none: this publishes |
| ``.deleted/POLICY/N`` | the highest number of a deleted version |
| ``.deleting/POLICY@N`` | its row is being deleted, until its files are |
| ``.owner`` | whose database names the versions |

Two that publish the same version upload to different folders, so neither writes over the other's
files, and one of them creates the manifest. A deletion removes the manifest first. What has no
manifest is no version; it is swept up (`sweep`).

Objects are of a bucket (S3, GCS, Azure) or of a folder, by obstore: each request has a bound.
Credentials are found where the store's own programs find them: environment variables, and what a
cloud gives its machines.
"""

from __future__ import annotations

import re
import uuid
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import from_url
from pydantic_core import from_json

from langchain_art.errors import ConfigError, Damaged, EngineUnavailable
from langchain_art_server.backends.models.adapter_files import MANIFEST, check_files, sha256

#: Seconds for a request, whole with its part of a file; for making a connection; and after which
#: what has failed is not tried again.
REQUEST_SECONDS, CONNECT_SECONDS, RETRY_SECONDS = 15, 3, 10
_RETRIES = 3
#: Bytes of a file that one request carries, and how many of them run at once.
_PART, _AT_ONCE = 8 << 20, 4
_CODE = re.compile(r"<Code>(\w+)</Code>")
_REFUSED = (PermissionDeniedError, UnauthenticatedError)


class ObjectStore:
    """The objects below a URL; their names are relative to it.

    Args:
        url: such as ``s3://bucket/prefix``.

    Raises:
        ConfigError: the URL says too little, such as Azure's without an account.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        client = {
            "allow_http": True,  # where AWS_ENDPOINT_URL, or its like, says http
            "timeout": f"{REQUEST_SECONDS}s",
            "connect_timeout": f"{CONNECT_SECONDS}s",
        }
        retry = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
        try:
            self._store = from_url(url, client_options=client, retry_config=retry)  # type: ignore[arg-type]
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"got adapters_url={url!r}, which cannot be used: {_in_words(error)}"
            ) from error

    def require(self) -> None:
        """See that objects can be written, created once, read, listed and deleted.

        Raises:
            ConfigError: they cannot; says why.
        """
        probe = f".probe/{uuid.uuid4().hex}"
        try:
            self.create(probe, b"1")
            again = self.create(probe, b"2")
            kept, listed = self.read(probe), probe in self.list(".probe")
            self.delete([probe])
        except EngineUnavailable as error:
            raise ConfigError(
                f"got adapters_url={self.url!r}, and it cannot be used: "
                f"{_in_words(error.__cause__ or error)}. Expected a bucket that is there, and "
                "credentials for it in the environment (of S3: AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL, or the machine's own role)"
            ) from error
        if again or kept != b"1" or not listed:
            raise ConfigError(
                f"got adapters_url={self.url!r}, a store that writes over an object which exists "
                "where it is told not to (If-None-Match: *), or that does not list what was "
                "written; expected one with conditional writes and consistent lists, as S3, GCS "
                "and Azure have"
            )

    def put(self, name: str, file: Path) -> None:
        """Write a file as an object, over an earlier one. Raises EngineUnavailable."""
        with self._answering():
            obstore.put(self._store, name, file, chunk_size=_PART, max_concurrency=_AT_ONCE)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one; whether it was written. Raises EngineUnavailable.

        A request that is tried again may find what its first try has written.
        """
        with self._answering():
            try:
                obstore.put(self._store, name, content, mode="create")
            except AlreadyExistsError:
                return False
        return True

    def read(self, name: str) -> bytes | None:
        """A small object; None: there is none. Raises EngineUnavailable."""
        with self._answering():
            try:
                return bytes(obstore.get(self._store, name).bytes())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def download(self, name: str, file: Path) -> None:
        """Read an object into a new file. Raises EngineUnavailable, FileNotFoundError."""
        with self._answering(missing=True):
            size = obstore.head(self._store, name)["size"]
            with file.open("xb") as target, ThreadPoolExecutor(_AT_ONCE) as threads:
                target.truncate(size)

                def fetch(start: int) -> None:
                    length = min(_PART, size - start)
                    part = obstore.get_range(self._store, name, start=start, length=length)
                    with file.open("r+b") as own:
                        own.seek(start)
                        own.write(part)

                for _ in threads.map(fetch, range(0, size, _PART)):
                    pass

    def list(self, below: str) -> dict[str, datetime]:
        """Names of the objects in a folder and below it, with when each was written.

        Raises EngineUnavailable.
        """
        with self._answering():
            found = obstore.list(self._store, below or None)
            return {one["path"]: one["last_modified"] for part in found for one in part}

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects that are there, in this order. Raises EngineUnavailable."""
        for name in names:
            with self._answering(), suppress(FileNotFoundError):
                obstore.delete(self._store, name)

    @contextmanager
    def _answering(self, *, missing: bool = False) -> Generator[None]:
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            if missing and isinstance(error, FileNotFoundError):
                raise
            does = "refuses" if isinstance(error, _REFUSED) else "does not do"
            raise EngineUnavailable(
                f"The object store {self.url} {does} what it was asked: {_in_words(error)}. Send "
                "the request again.",
                retry_after=5,
            ) from error


def _in_words(error: BaseException) -> str:
    """Error of obstore: its first line (the others are its own structures), and S3's code."""
    said = str(error)
    code = _CODE.search(said)
    first = said.partition("\n")[0].partition("<?xml")[0].strip(" .:")[:400]
    return first if code is None else f"{first} ({code[1]})"


#: Time without a manifest after which an upload counts as abandoned.
LEFT_AFTER = timedelta(hours=24)
_DELETED, _DELETING, _OWNER = ".deleted", ".deleting", ".owner"
_PUBLISHED = re.compile(rf"([a-z0-9][^/]*)/(0|[1-9][0-9]*)/{re.escape(MANIFEST)}")
_UPLOADED = re.compile(r"([a-z0-9][^/]*/[0-9]+)/([0-9a-f]{64})/[^/]+")
#: Of a file in a manifest: a name, and no way out of a directory.
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class AdapterObjects:
    """The versions of one tenant.

    Args:
        store: the objects.
        below: the folder in it that is this tenant's.
    """

    def __init__(self, store: ObjectStore, below: str) -> None:
        self._store, self._below = store, below

    def __str__(self) -> str:
        return f"{self._store.url.rstrip('/')}/{self._below}"

    def require(self) -> None:
        """See `ObjectStore.require`."""
        self._store.require()

    def claim(self, owner: str) -> None:
        """Mark these versions as those that a database names; two would delete each other's.

        Raises:
            ConfigError: another database has.
        """
        mine, name = owner.encode(), self._name(_OWNER)
        if not self._store.create(name, mine) and (found := self._store.read(name)) != mine:
            raise ConfigError(
                f"The adapters in {self} belong to another database: got {owner!r}, and {_OWNER} "
                f"there says {(found or b'').decode(errors='replace')[:200]!r}. Give adapters_url "
                "another prefix; or delete that object, if it was this database before it was "
                "restored or moved."
            )

    def manifest(self, policy: str, version: int) -> bytes | None:
        """The manifest of a version, as it was written; None: there is no such version."""
        return self._store.read(self._name(policy, str(version), MANIFEST))

    def published(self, policy: str = "") -> set[tuple[str, int]]:
        """The versions of a policy, or of all."""
        found = map(_PUBLISHED.fullmatch, self._list(policy))
        return {(one[1], int(one[2])) for one in found if one is not None}

    def download(
        self,
        policy: str,
        version: int,
        written: bytes,
        folder: Path,
        wanted: Collection[str] | None = None,
        have: Path | None = None,
    ) -> dict[str, Any]:
        """Download the files of a version into an empty folder.

        Args:
            policy: its policy.
            version: its number.
            written: its manifest (`manifest`).
            folder: gets the manifest and those files that `have` has not; named as the version.
            wanted: names of files; None: all.
            have: the folder of a copy of this version, files of which may be missing or damaged.

        Returns:
            The manifest.

        Raises:
            Damaged: an object is missing, or is not what was published.
        """
        (folder / MANIFEST).write_bytes(written)
        about = check_files(folder, ())
        where = f"{policy}@{version} is damaged and is not used"
        fetched: list[str] = []
        for name, digest in about["files"].items():
            if not _FILE.fullmatch(name):
                raise Damaged(f"{where}: its manifest has a file {name[:200]!r}.")
            if (wanted is not None and name not in wanted) or _is(have, name, digest):
                continue
            try:
                source = self._name(policy, str(version), about["sha256"], name)
                self._store.download(source, folder / name)
            except FileNotFoundError as error:
                raise Damaged(f"{where}: {name} is missing in {self}.") from error
            fetched.append(name)
        return check_files(folder, fetched)

    def copy(self, policy: str, version: int, folder: Path) -> bool:
        """Download a version into an empty folder; False: it is not there. Raises Damaged."""
        if (written := self.manifest(policy, version)) is None:
            return False
        try:
            self.download(policy, version, written, folder)
        except Damaged:
            if self.manifest(policy, version) is None:  # deleted meanwhile
                return False
            raise
        return True

    def publish(self, policy: str, version: int, folder: Path) -> bool:
        """Upload a sealed version, and publish it; False: it exists."""
        manifest = self._name(policy, str(version), MANIFEST)
        written = (folder / MANIFEST).read_bytes()
        about = from_json(written)
        if self._store.read(manifest) is not None:
            return False
        upload = [self._name(policy, str(version), about["sha256"], one) for one in about["files"]]
        for name in upload:
            self._store.put(name, folder / name.rpartition("/")[2])
        if self._store.create(manifest, written) or self._store.read(manifest) == written:
            return True
        self._store.delete(upload)
        return False

    def delete(self, policy: str, version: int) -> None:
        """Note a version's number, and delete its manifest, then its files and what is left."""
        there = self._list(f"{policy}/{version}")
        manifest = f"{policy}/{version}/{MANIFEST}"
        if there:
            self.note_deleted(policy, version)
            first = sorted(there, key=lambda name: name != manifest)
            self._store.delete(self._name(name) for name in first)

    def highest_deleted(self, policy: str) -> int:
        """The highest number of a version that was deleted; -1: none was."""
        return max((version for _, version in self._notes(policy)), default=-1)

    def note_deleted(self, policy: str, version: int) -> None:
        """Write down that no later version gets this number, or a lower one."""
        notes = self._notes(policy)
        if version > max((number for _, number in notes), default=-1):
            self._store.create(self._name(_DELETED, policy, str(version)), b"")
            self._store.delete(self._name(_DELETED, policy, str(one)) for _, one in sorted(notes))

    def deleted(self) -> dict[str, int]:
        """The highest deleted version of each policy."""
        return dict(sorted(self._notes()))

    def _notes(self, policy: str = "") -> set[tuple[str, int]]:
        parts = [name.split("/") for name in self._list(f"{_DELETED}/{policy}".rstrip("/"))]
        return {(part[1], int(part[2])) for part in parts}

    def announce(self, policy: str, version: int) -> None:
        """See `AdapterStore.announce`."""
        self._store.create(self._name(_DELETING, f"{policy}@{version}"), b"")

    def announced(self) -> list[tuple[str, int]]:
        """See `AdapterStore.announced`."""
        names = sorted(name.partition("/")[2].rpartition("@") for name in self._list(_DELETING))
        return [(policy, int(version)) for policy, _, version in names]

    def spare(self, policy: str, version: int) -> None:
        """See `AdapterStore.spare`."""
        self._store.delete([self._name(_DELETING, f"{policy}@{version}")])

    def sweep(self, policy: str = "") -> None:
        """Delete uploads that no manifest names: of a former attempt, or older than `LEFT_AFTER`.

        Args:
            policy: whose; by default of all.
        """
        listed, uploads = self._list(policy), defaultdict[str, dict[str, list[str]]](dict)
        for name in listed:
            if (one := _UPLOADED.fullmatch(name)) is not None:
                uploads[one[1]].setdefault(one[2], []).append(name)
        late = datetime.now(UTC) - LEFT_AFTER
        for version, attempts in uploads.items():
            is_published, named = f"{version}/{MANIFEST}" in listed, None
            if is_published and len(attempts) > 1:
                named = from_json(self._store.read(self._name(version, MANIFEST)) or b"{}")
            for attempt, names in attempts.items():
                left = not is_published and max(listed[name] for name in names) < late
                if left or (named is not None and named.get("sha256", attempt) != attempt):
                    self._store.delete(map(self._name, names))

    def _name(self, *parts: str) -> str:
        return "/".join((self._below, *parts))

    def _list(self, folder: str) -> dict[str, datetime]:
        """The objects below a folder, by their names relative to this tenant's."""
        found = self._store.list(self._name(folder) if folder else self._below)
        return {name.removeprefix(f"{self._below}/"): when for name, when in found.items()}


def _is(folder: Path | None, name: str, digest: str) -> bool:
    """True if a folder has a file, undamaged."""
    try:
        return folder is not None and sha256(folder / name) == digest
    except OSError:
        return False
