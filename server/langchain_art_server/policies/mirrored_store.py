"""The versions of a fleet whose servers share an object store; each disk has copies of some.

A version is downloaded when it is first read here: to be loaded, trained from or exported. It stays
until it is deleted (`AdapterStore.drop_copy`, which the router asks for), so a disk holds at most
the versions that are kept. A copy is compared with the store's manifest before it is read, and what
is missing or damaged is downloaded again. If the store does not answer, a whole copy is read.
"""

from __future__ import annotations

import importlib
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_art.errors import ConfigError, Damaged, EngineUnavailable
from langchain_art_server.backends.models.adapter_files import MANIFEST, check_files
from langchain_art_server.policies.adapter_store import (
    Absent,
    AdapterStore,
    fsync,
    make_directory,
    versions_below,
)

if TYPE_CHECKING:
    from langchain_art_server.policies.adapter_objects import AdapterObjects

log = logging.getLogger(__name__)
#: In a directory of copies: what they are copies of, the store's URL and a folder in it.
ORIGIN = ".origin"


@dataclass
class _Turn:
    """A shared wait for a copy of one version. All who wait get the same failure."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    failed_at: float = -math.inf
    failure: EngineUnavailable | None = None


class MirroredStore(AdapterStore):
    """An `AdapterStore` whose versions are in an object store.

    Args:
        root: holds this disk's copies, and what is being made. No other server has it.
        objects: the versions.
    """

    def __init__(self, root: Path, objects: AdapterObjects) -> None:
        super().__init__(root)
        self._objects = objects
        #: A version is downloaded once, also if several ask for it.
        self._turns = defaultdict[tuple[str, int], _Turn](_Turn)

    def __str__(self) -> str:
        """Place of the versions, for people."""
        return str(self._objects)

    def _publish(self, staged: Path, policy: str, version: int) -> bool:
        """Upload a sealed version; then it is this disk's copy."""
        if 0 < version <= self._objects.highest_deleted(policy):
            return False
        if not self._objects.publish(policy, version, staged):
            return False
        with self._turns[policy, version].lock:
            self._place(staged, policy, version)
        try:
            self._objects.sweep(policy)
        except EngineUnavailable as error:
            log.warning("What former attempts have uploaded is left for the next sweep: %s", error)
        return True

    def _place(self, staged: Path, policy: str, version: int) -> None:
        """Make a directory the copy of a version, instead of one that there may be."""
        target = self.path(policy, version)
        self.drop_copy(policy, version)
        make_directory(target.parent)
        staged.rename(target)
        fsync(target.parent)

    def _checked(
        self, policy: str, version: int, names: Collection[str] | None = None
    ) -> dict[str, Any]:
        folder, asked = self.path(policy, version), time.monotonic()
        turn = self._turns[policy, version]
        with turn.lock:
            try:
                if turn.failed_at < asked:
                    return self._renewed(policy, version, names)
                error = turn.failure
            except EngineUnavailable as failure:
                turn.failed_at, turn.failure = time.monotonic(), failure
                error = failure
            with suppress(Damaged):
                about = check_files(folder, names)
                log.warning("%s@%d is read from this disk's copy. %s", policy, version, error)
                return about
            assert error is not None
            raise EngineUnavailable(str(error), retry_after=error.retry_after) from error

    def _renewed(self, policy: str, version: int, names: Collection[str] | None) -> dict[str, Any]:
        """Compare the copy with the store, and download what it lacks. Returns the manifest."""
        folder = self.path(policy, version)
        if (written := self._objects.manifest(policy, version)) is None:
            raise Absent(f"{policy}@{version} is not in {self._objects}.")
        with suppress(Damaged):
            about = check_files(folder, names)
            if (folder / MANIFEST).read_bytes() == written:
                return about
        return self._download(policy, version, written, names)

    def _download(
        self, policy: str, version: int, written: bytes, names: Collection[str] | None
    ) -> dict[str, Any]:
        """Make a copy, or mend the one that is there. Returns the manifest.

        Raises:
            Damaged: the store changed it (`Absent`: it was deleted).
            EngineUnavailable: the store does not answer, or the disk is full.
        """
        copy = self.path(policy, version)
        mends = _is_copy(copy, written)
        try:
            staged = self.stage()
            try:
                part = staged / policy / str(version)
                part.mkdir(parents=True)
                have = copy if mends else None
                about = self._objects.download(policy, version, written, part, names, have)
                if mends:
                    for file in part.iterdir():
                        file.replace(copy / file.name)
                else:
                    self._place(part, policy, version)
            finally:
                self.discard(staged)
        except Damaged as error:
            if self.exists(policy, version):
                raise
            raise Absent(f"{policy}@{version} was deleted meanwhile.") from error
        except OSError as error:
            raise EngineUnavailable(
                f"{policy}@{version} could not be copied to {copy}: {error}. Free disk space, then "
                "send the request again.",
                retry_after=30,
            ) from error
        return about

    def _remedy(self, policy: str, version: int) -> str:
        others = [one for one in self.versions(policy) if one != version]
        back = f"Put it back into {self._objects}, from a backup or from the bucket's own versions"
        return f"{back}, or roll back to another one of {others}." if others else f"{back}."

    def exists(self, policy: str, version: int) -> bool:
        """True if a version is in the store, damaged or not."""
        self.path(policy, version)
        return self._objects.manifest(policy, version) is not None

    def may_have(self, policy: str, version: int) -> bool:
        """True: a fleet's database is asked for each name before (`Router.before_use`)."""
        return True

    def versions(self, policy: str) -> list[int]:
        """Numbers of the versions that are there, ascending."""
        self.path(policy, 0)
        return sorted(version for _, version in self._objects.published(policy))

    def _highest_deleted(self, policy: str) -> int:
        return self._objects.highest_deleted(policy)

    def announce(self, policy: str, version: int) -> None:
        """See `AdapterStore.announce`."""
        if self.exists(policy, version):
            self._objects.announce(policy, version)

    def announced(self) -> list[tuple[str, int]]:
        """See `AdapterStore.announced`."""
        return self._objects.announced()

    def spare(self, policy: str, version: int) -> None:
        """See `AdapterStore.spare`."""
        self._objects.spare(policy, version)

    def delete(self, policy: str, version: int) -> None:
        """Remove a version, if it is there: its manifest first, so that no reader finds a part."""
        self.path(policy, version)
        self._objects.delete(policy, version)
        self.drop_copy(policy, version)
        self.spare(policy, version)

    def adopt(self, kept: Iterable[tuple[str, int]], owner: str) -> None:
        """Upload those of `kept` that the store has not, and this disk has; call it at the start.

        They are of a server that had no object store, or of a backup. So are the numbers of deleted
        versions.

        Args:
            kept: the versions that the database names.
            owner: the database.

        Raises:
            ConfigError: the versions in the store are another database's.
        """
        self._objects.claim(owner)
        for note in self._deleted.iterdir():
            self._objects.note_deleted(note.name, int(note.read_text()))
            note.unlink()
        for policy, version in sorted(set(kept) - self._objects.published()):
            with suppress(Damaged):  # whoever needs it finds that it is not there
                check_files(self.path(policy, version))
                self._objects.publish(policy, version, self.path(policy, version))
                log.warning("%s@%d was uploaded to %s.", policy, version, self._objects)
        self._objects.sweep()

    def copies(self) -> list[tuple[str, int]]:
        """The versions of which this disk has a copy."""
        return sorted(versions_below(self._root))

    def drop_copy(self, policy: str, version: int) -> None:
        """Remove this disk's copy of a version, if there is one."""
        removed = self.stage()
        with suppress(FileNotFoundError):
            self.path(policy, version).rename(removed)
        self.discard(removed)


def _is_copy(folder: Path, written: bytes) -> bool:
    """True if a directory has this manifest, and no links."""
    try:
        is_linked = any(one.is_symlink() for one in (folder, *folder.iterdir()))
        return not is_linked and (folder / MANIFEST).read_bytes() == written
    except OSError:
        return False


def open_objects(url: str, below: str) -> AdapterObjects:
    """The versions of one tenant in an object store.

    Raises:
        ConfigError: the library is not installed, or the URL says too little.
    """
    try:
        module = importlib.import_module("langchain_art_server.policies.adapter_objects")
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "obstore":
            raise
        raise ConfigError(
            f"got adapters_url={url!r}, and obstore is not installed where the server runs; "
            'install it: pip install "langchain-art[objects]"'
        ) from missing
    return module.AdapterObjects(module.ObjectStore(url), below)


def objects_of(root: Path) -> AdapterObjects | None:
    """Store that a directory copies; None: it holds the versions. Raises as `open_objects`."""
    if (origin := _origin(root)) is None:
        return None
    url, below = origin.splitlines()
    return open_objects(url, below)


def _origin(root: Path) -> str | None:
    file = root / ORIGIN
    return file.read_text() if file.exists() else None


def open_adapters(root: Path, url: str | None, below: str, *, shared: bool) -> AdapterStore:
    """The versions in a directory, or those of an object store with their copies there.

    Args:
        root: the directory.
        url: of the object store; None: the directory holds the versions.
        below: the folder in the object store.
        shared: servers of a fleet may use the directory at the same time, if it holds them.

    Raises:
        ConfigError: the object store cannot be used, or the directory has copies of another one.
    """
    wanted = None if url is None else f"{url}\n{below}\n"
    if (origin := _origin(root)) not in (None, wanted):
        raise ConfigError(
            f"{root} has copies of the versions in {origin.splitlines()[0]}, and adapters_url is "
            f"{'not set' if url is None else repr(url)}. Set it to that store, or give this server "
            "another --data-dir."
        )
    if url is None or wanted is None:
        return AdapterStore(root, shared=shared)
    objects = open_objects(url, below)
    objects.require()
    store = MirroredStore(root, objects)
    (root / ORIGIN).write_text(wanted)
    return store
