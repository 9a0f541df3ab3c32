"""The checkpoints of policies on disk: one immutable directory ``adapters/<policy>/<N>`` a version.

A version's name (``email-agent@17``) is used once. It is built in a staging directory;
``manifest.json`` (SHA-256 of every file and of itself, parent, job, metrics) is written last,
everything is fsynced, and one rename publishes it: a version is complete or absent. Whoever reads a
version checks the digests first (`check`): what the disk changed is refused.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import fcntl
import io
import os
import shutil
import tarfile
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from langchain_art.errors import ConfigError, Damaged, InvalidRequest
from langchain_art.wire import NAME, Checkpoint
from langchain_art_server.backends.models.adapter_files import (
    CONFIG_FILE,
    MANIFEST,
    WEIGHTS_FILE,
    check_files,
    sha256,
    write_manifest,
)

P = ParamSpec("P")
T = TypeVar("T")
#: The files of ``GET …/adapter``: all but the optimizer's state.
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST)
#: They wait for the stores' disk.
_THREADS = ThreadPoolExecutor(16, "adapters")


def fsync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, if they are missing, and flush their names to disk."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        fsync(path.parent)


def names_in(folder: Path) -> list[str]:
    """Sorted names in a directory that is there, without hidden ones."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))
    return []


def versions_below(root: Path) -> set[tuple[str, int]]:
    """Policy and number of each version that has a directory."""
    found = [root / policy / name for policy in names_in(root) for name in names_in(root / policy)]
    return {
        (one.parent.name, int(one.name)) for one in found if one.name.isdecimal() and one.is_dir()
    }


class VersionTaken(ConfigError):
    """A version of this name exists."""


class Absent(Damaged):
    """There is no version of this name."""


class AdapterStore:
    """The directories of versions. Which version serves is in the database and in `Router`.

    They are below `root`; if it is `shared`, servers of a fleet use it at the same time.
    """

    def __init__(self, root: Path, *, shared: bool = False) -> None:
        self._root = root
        self._staging = root / ".staging"
        if shared:
            self._staging = self._staging_of_this_server()
        else:
            shutil.rmtree(self._staging, ignore_errors=True)  # of a process that was killed
            make_directory(self._staging)
        # One file a policy: the highest number of a deleted version.
        self._deleted = root / ".deleted"
        make_directory(self._deleted)
        # One file a version whose row is being deleted, until its files are.
        self._deleting = root / ".deleting"
        make_directory(self._deleting)

    def __str__(self) -> str:
        """Place of the versions, for people."""
        return str(self._root)

    async def off_loop(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Do what reads or writes versions in threads that nothing else uses.

        If the disk does not answer, only what needs it waits.
        """
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_THREADS, lambda: context.run(work, *args, **options))

    def _staging_of_this_server(self) -> Path:
        """A locked directory of its own; those whose servers have ended are removed."""
        make_directory(self._staging)
        whole = os.open(self._staging, os.O_RDONLY)
        try:
            fcntl.flock(whole, fcntl.LOCK_EX)  # one server at a time looks
            for former in self._staging.iterdir():
                handle = os.open(former, os.O_RDONLY)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                else:
                    self.discard(former) if former.is_dir() else former.unlink()
                finally:
                    os.close(handle)
            mine = self._staging / uuid.uuid4().hex
            mine.mkdir()
            self._lock = os.open(mine, os.O_RDONLY)  # held until the process ends
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        finally:
            os.close(whole)
        return mine

    def path(self, policy: str, version: int) -> Path:
        """A version's directory, which need not exist."""
        if not NAME.fullmatch(policy):
            raise InvalidRequest(f"got {policy!r}, expected a policy's name", param="policy")
        return self._root / policy / str(version)

    def stage(self) -> Path:
        """A new empty directory to build a version in."""
        path = self._staging / uuid.uuid4().hex
        path.mkdir()
        return path

    def discard(self, staged: Path) -> None:
        """Remove a staging directory, if it is there."""
        if staged.exists():
            shutil.rmtree(staged)

    def seal(self, staged: Path) -> dict[str, str]:
        """Flush staged files to disk. Returns the SHA-256 of each."""
        files: dict[str, str] = {}
        for path in sorted(staged.iterdir()):
            files[path.name] = sha256(path)
            fsync(path)
        return files

    def publish(
        self,
        staged: Path,
        policy: str,
        version: int,
        manifest: dict[str, Any],
        files: dict[str, str] | None = None,
    ) -> Path:
        """Publish a staged version, with its manifest: it is at its place then.

        `files` is the result of `seal`, if it was called already.

        Raises VersionTaken: the version exists.
        """
        files = files or self.seal(staged)
        write_manifest(staged, manifest | {"files": files})
        fsync(staged / MANIFEST)
        fsync(staged)
        target = self.path(policy, version)
        make_directory(target.parent)
        taken = VersionTaken(
            f"{policy}@{version} exists, or was deleted; a version's name is used once."
        )
        if target.exists():
            raise taken
        try:
            staged.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # since then
                raise taken from error
            raise
        fsync(target.parent)
        return target

    def check(
        self, policy: str, version: int, names: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Check a version's files, or those of `names`. Returns its manifest.

        They are then at `path`.

        Raises Damaged: it is damaged (`Absent`: not there); says from what it can be restored.
        """
        try:
            return self._checked(policy, version, names)
        except Damaged as error:
            whole = [other for other in self.versions(policy) if self.is_whole(policy, other)]
            remedy = f"Put the directory {self.path(policy, version)} back from a backup"
            remedy += f", or roll back to a version that is whole: {whole}" if whole else ""
            raise type(error)(f"{error} {remedy}.") from error

    def _checked(
        self, policy: str, version: int, names: Collection[str] | None = None
    ) -> dict[str, Any]:
        try:
            return check_files(self.path(policy, version), names)
        except Damaged as error:
            if self.exists(policy, version):
                raise
            raise Absent(str(error)) from error

    def is_whole(self, policy: str, version: int) -> bool:
        """True if a version is there and undamaged."""
        try:
            self._checked(policy, version)
        except Damaged:
            return False
        return True

    def exists(self, policy: str, version: int) -> bool:
        """True if a version is there, damaged or not."""
        return self.path(policy, version).exists()

    def manifest(self, policy: str, version: int) -> dict[str, Any] | None:
        """The manifest of a version; None if it is absent. Raises Damaged."""
        return self.check(policy, version) if self.exists(policy, version) else None

    def archive(self, policy: str, version: int) -> bytes:
        """A tar archive of `ADAPTER_FILES` of a version. Raises Damaged."""
        self.check(policy, version, ADAPTER_FILES)
        path, buffer = self.path(policy, version), io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name in ADAPTER_FILES:
                tar.add(path / name, arcname=name)
        return buffer.getvalue()

    def versions(self, policy: str) -> list[int]:
        """Numbers of the versions that are there, ascending."""
        names = names_in(self.path(policy, 0).parent)
        return sorted(int(name) for name in names if name.isdecimal())

    def unused(self, policy: str) -> int:
        """The number after the highest one that a version has, or had before it was deleted."""
        return max([self._highest_deleted(policy), *self.versions(policy)]) + 1

    def _highest_deleted(self, policy: str) -> int:
        noted = self._deleted / policy
        return int(noted.read_text()) if noted.exists() else -1

    def announce(self, policy: str, version: int) -> None:
        """Write down that a version is about to be deleted, if it is there: a crash delays it."""
        if self.exists(policy, version):
            (self._deleting / f"{policy}@{version}").touch()
            fsync(self._deleting)

    def announced(self) -> list[tuple[str, int]]:
        """The versions that were announced, and are neither deleted nor spared."""
        names = sorted(one.name.rpartition("@") for one in self._deleting.iterdir())
        return [(policy, int(version)) for policy, _, version in names]

    def spare(self, policy: str, version: int) -> None:
        """Take an announcement back."""
        (self._deleting / f"{policy}@{version}").unlink(missing_ok=True)
        fsync(self._deleting)

    def delete(self, policy: str, version: int) -> None:
        """Remove a version, if it is there.

        Its number is written down first, so that no later version gets its name; then one rename
        takes it away, so that a crash leaves no partial version.
        """
        path = self.path(policy, version)
        if path.exists():
            fresh = self._staging / uuid.uuid4().hex
            fresh.write_text(str(max(version, self._highest_deleted(policy))))
            fsync(fresh)
            fresh.replace(self._deleted / policy)
            fsync(self._deleted)
            removed = self._staging / uuid.uuid4().hex
            with suppress(FileNotFoundError):  # another server deletes it, too
                path.rename(removed)
                fsync(path.parent)
                shutil.rmtree(removed)
        self.spare(policy, version)

    def checkpoint(self, manifest: dict[str, Any]) -> Checkpoint:
        """The wire value of a published version, from its manifest and its size on disk."""
        policy, version = manifest["policy"], manifest["version"]
        return Checkpoint(
            name=f"{policy}@{version}",
            bytes=sum(p.stat().st_size for p in self.path(policy, version).iterdir()),
            **{name: manifest[name] for name in Checkpoint.model_fields if name in manifest},
        )
