"""Adapter versions: names, atomic publishing, which version a name is routed to, retention.

A version is an immutable directory ``adapters/<policy>/<N>`` with a name that is used once
(``email-agent@17``). It is built in a staging directory; ``manifest.json`` (SHA-256 of every file,
parent, job, metrics) is written last, everything is fsynced, and one rename makes it appear: a
version is whole or it is not there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from langchain_art.errors import ConfigError, InvalidRequest, UnknownModel
from langchain_art.wire import NAME
from langchain_art_server.backends.base import Sampler
from langchain_art_server.backends.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
#: What another machine needs to use an adapter; the optimizer's state stays here.
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST)
#: Versions that are kept loaded because somebody asked for them by number.
MAX_PINNED_LOADED = 8
_VERSION = re.compile(r"0|[1-9][0-9]{0,8}")


def fsync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class AdapterStore:
    """The directories. Nothing here knows which version serves."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._staging = root / ".staging"
        shutil.rmtree(self._staging, ignore_errors=True)  # what a crash left half-built
        self._staging.mkdir(parents=True)
        self._deleted = root / ".deleted"  # policy -> the highest number of a deleted version
        self._deleted.mkdir(exist_ok=True)

    def path(self, policy: str, version: int) -> Path:
        """Where a version is, or would be."""
        if not NAME.fullmatch(policy):
            raise InvalidRequest(f"got {policy!r}, expected a policy's name", param="policy")
        return self._root / policy / str(version)

    def stage(self) -> Path:
        """A new empty directory to build a version in."""
        path = self._staging / uuid.uuid4().hex
        path.mkdir()
        return path

    def discard(self, staged: Path) -> None:
        """Remove what was staged and is not published."""
        if staged.exists():
            shutil.rmtree(staged)

    def seal(self, staged: Path) -> dict[str, str]:
        """Flush what was staged to disk. Returns the SHA-256 of each file."""
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
        """Make a staged version appear, whole, under its name.

        Args:
            staged: of `stage`.
            policy: whose version it is.
            version: its number.
            manifest: what is to be known of it; the files' hashes are added.
            files: what `seal` said, if it was called.

        Raises:
            ConfigError: the version exists already (names are used once).
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
        """The manifest if the version is there and whole, else None (logged if damaged)."""
        path = self.path(policy, version)
        if not path.exists():
            return None
        try:
            manifest = from_json((path / MANIFEST).read_bytes())
            for name, expected in manifest["files"].items():
                if hashlib.sha256((path / name).read_bytes()).hexdigest() != expected:
                    raise ValueError(f"{name} is not what was published")
        except (OSError, ValueError, KeyError) as error:
            log.error("%s@%d is damaged and will not be used: %s", policy, version, error)
            return None
        return manifest

    def versions(self, policy: str) -> list[int]:
        """Version numbers with a directory, ascending."""
        folder = self.path(policy, 0).parent
        if not folder.is_dir():
            return []
        return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal())

    def unused(self, policy: str) -> int:
        """A number that no version has, or had before it was deleted; higher than all of those."""
        return max([self._highest_deleted(policy), *self.versions(policy)]) + 1

    def _highest_deleted(self, policy: str) -> int:
        noted = self._deleted / policy
        return int(noted.read_text()) if noted.exists() else -1

    def policies(self) -> list[str]:
        """Policies with a directory."""
        return sorted(p.name for p in self._root.iterdir() if NAME.fullmatch(p.name))

    def delete(self, policy: str, version: int) -> None:
        """Remove a version: out of sight by a rename first, so that a crash leaves no torn one.

        Its number is noted before, so that no later version gets its name.
        """
        path = self.path(policy, version)
        if path.exists():
            fresh = self._staging / uuid.uuid4().hex
            fresh.write_text(str(max(version, self._highest_deleted(policy))))
            fsync(fresh)
            fresh.replace(self._deleted / policy)
            fsync(self._deleted)
            grave = self._staging / uuid.uuid4().hex
            path.rename(grave)
            shutil.rmtree(grave)

    def size(self, policy: str, version: int) -> int:
        """Bytes on disk."""
        return sum(p.stat().st_size for p in self.path(policy, version).iterdir())


@dataclass(frozen=True)
class Target:
    """What a model's name means right now."""

    adapter: str | None
    """The sampler's name for it; None is the base model."""
    policy: str | None
    version: int | None
    model: str
    """What the reply says: ``email-agent@17``, or the base model's name."""


class Router:
    """Which version each name is routed to; loads versions before and unloads them after use.

    A version that stops serving is unloaded when the last call that was routed to it has ended, so
    that a swap drops and mixes nothing.
    """

    def __init__(self, base_name: str, store: AdapterStore, sampler: Sampler) -> None:
        self.base_name = base_name
        self._store, self._sampler = store, sampler
        self.serving: dict[str, int] = {}
        self._users: Counter[str] = Counter()
        self._loaded: OrderedDict[str, None] = OrderedDict()

    async def serve(self, policy: str, version: int) -> None:
        """Route the bare name to `version`: load it first, then switch. `trim` when time allows."""
        await self._load(policy, version)
        self.serving[policy] = version

    async def _load(self, policy: str, version: int) -> str:
        name = f"{policy}@{version}"
        if name not in self._loaded:
            await self._sampler.load_adapter(name, self._store.path(policy, version))
        self._loaded[name] = None
        self._loaded.move_to_end(name)
        return name

    async def forget(self, policy: str, version: int) -> None:
        """Unload a version that is about to be deleted."""
        name = f"{policy}@{version}"
        if self._users[name]:
            raise InvalidRequest(
                f"{name} is answering {self._users[name]} calls right now; try again when they "
                "have ended."
            )
        self._loaded.pop(name, None)
        await self._sampler.unload_adapter(name)

    async def trim(self) -> None:
        """Unload what neither serves nor is in use, but for the last few asked for by number."""
        serving = {f"{policy}@{version}" for policy, version in self.serving.items()}
        idle = [n for n in self._loaded if n not in serving and not self._users[n]]
        for name in idle[: max(0, len(idle) - MAX_PINNED_LOADED)]:
            del self._loaded[name]
            await self._sampler.unload_adapter(name)

    @asynccontextmanager
    async def use(self, model: str) -> AsyncGenerator[Target]:
        """Resolve a model's name and hold what it means until the call has ended.

        Raises:
            UnknownModel: with the names that there are.
        """
        target = await self.resolve(model)
        if target.adapter is None:
            yield target
            return
        self._users[target.adapter] += 1
        try:
            yield target
        finally:
            self._users[target.adapter] -= 1
            if not self._users[target.adapter]:
                del self._users[target.adapter]
                if self.serving.get(target.policy or "") != target.version:
                    await self.trim()

    async def resolve(self, model: str) -> Target:
        """What `model` means now: the base model, a policy, or one version of it."""
        if model == self.base_name:
            return Target(None, None, None, model)
        policy, at, number = model.partition("@")
        if not at and policy in self.serving:
            version = self.serving[policy]
            name = f"{policy}@{version}"
            return Target(name, policy, version, name)
        if at and policy in self.serving and _VERSION.fullmatch(number):
            version = int(number)
            name = f"{policy}@{version}"
            if name in self._loaded or self._store.path(policy, version).is_dir():
                await self._load(policy, version)
                return Target(name, policy, version, name)
        known = sorted([self.base_name, *self.serving])
        raise UnknownModel(
            f"got model {model!r}, expected one of {known}, or POLICY@VERSION for a version that "
            'is kept. Make a policy with POST /v1/policies {"name": …}, `Trainer.fit`, or '
            "`langchain-art serve --policy NAME`.",
            param="model",
        )
