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
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from langchain_art.errors import ConfigError, Damaged
from langchain_art_server.backends.models.adapter_files import MANIFEST, check_files, sha256

if TYPE_CHECKING:
    from langchain_art_server.policies.object_store import ObjectStore

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
