"""The checkpoints of policies on disk: one immutable directory ``adapters/<policy>/<N>`` a version.

A version's name (``email-agent@17``) is used once. It is built in a staging directory;
``manifest.json`` (SHA-256 of every file, parent, job, metrics) is written last, everything is
fsynced, and one rename publishes it: a version is complete or absent.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art.wire import NAME, Checkpoint
from langchain_art_server.backends.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
#: The files of ``GET …/adapter``: all but the optimizer's state.
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST)


def fsync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class AdapterStore:
    """The directories of versions. Which version serves is in the database and in `Router`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._staging = root / ".staging"
        shutil.rmtree(self._staging, ignore_errors=True)  # of a process that was killed
        self._staging.mkdir(parents=True)
        # One file a policy: the highest number of a deleted version.
        self._deleted = root / ".deleted"
        self._deleted.mkdir(exist_ok=True)

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
            with path.open("rb") as file:
                files[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
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
        """Move a staged version to its place, by one rename, with its manifest.

        `files` is the result of `seal`, if it was called already.

        Raises:
            ConfigError: the version exists.
        """
        target = self.path(policy, version)
        files = files or self.seal(staged)
        (staged / MANIFEST).write_bytes(to_json(manifest | {"files": files}, indent=2))
        fsync(staged / MANIFEST)
        fsync(staged)
        target.parent.mkdir(exist_ok=True)
        if target.exists():
            raise ConfigError(f"{policy}@{version} exists already; a version's name is used once.")
        staged.rename(target)
        fsync(target.parent)
        return target

    def manifest(self, policy: str, version: int) -> dict[str, Any] | None:
        """A version's manifest; None if the version is absent, or damaged (which is logged)."""
        path = self.path(policy, version)
        if not path.exists():
            return None
        try:
            manifest = from_json((path / MANIFEST).read_bytes())
            for name, expected in manifest["files"].items():
                if hashlib.sha256((path / name).read_bytes()).hexdigest() != expected:
                    raise ValueError(f"{name} has another SHA-256 than when it was published")
        except (OSError, ValueError, KeyError) as error:
            log.error("%s@%d is damaged and will not be used: %s", policy, version, error)
            return None
        return manifest

    def versions(self, policy: str) -> list[int]:
        """Numbers of the versions that have a directory, ascending."""
        folder = self.path(policy, 0).parent
        if not folder.is_dir():
            return []
        return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal())

    def unused(self, policy: str) -> int:
        """The number after the highest one that a version has, or had before it was deleted."""
        return max([self._highest_deleted(policy), *self.versions(policy)]) + 1

    def _highest_deleted(self, policy: str) -> int:
        noted = self._deleted / policy
        return int(noted.read_text()) if noted.exists() else -1

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
            path.rename(removed)
            shutil.rmtree(removed)

    def checkpoint(self, manifest: dict[str, Any]) -> Checkpoint:
        """The wire value of a published version, from its manifest and its size on disk."""
        policy, version = manifest["policy"], manifest["version"]
        return Checkpoint(
            name=f"{policy}@{version}",
            bytes=sum(p.stat().st_size for p in self.path(policy, version).iterdir()),
            **{name: manifest[name] for name in Checkpoint.model_fields if name in manifest},
        )
