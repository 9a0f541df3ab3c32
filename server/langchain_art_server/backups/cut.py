"""A consistent cut of a running server's data: each database at one moment, and its versions.

Versions are pinned by hard links, so that one which a rollback or retention removes meanwhile stays
readable; those in an object store are downloaded. That is done before the database is copied and
again after: a version is removed from the database first, and published before it is in it, so
whatever a copy names was pinned before, or is still there after. If one came and went in between,
the cut is made anew.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from langchain_art.errors import ConfigError, Damaged
from langchain_art_server.backups.databases import Databases, named_versions
from langchain_art_server.policies.mirrored_store import objects_of
from langchain_art_server.storage.schema import connect

#: The directories of `AdapterStore` that hold no versions.
_DELETED = ".deleted"
#: Cuts that are made, at most, because versions came and went meanwhile.
_TRIES = 20


class Cut:
    """The files of a cut, below `pins` (hard links) and `work` (copies of databases).

    `places` are the directories of a server and of its tenants, relative to the data directory,
    with the URLs of their databases.
    """

    def __init__(self, data_dir: Path, places: dict[Path, str], pins: Path, work: Path) -> None:
        self._data_dir, self._places = data_dir, places
        self._pins, self._work = pins, work
        found = {place: objects_of(data_dir / place / "adapters") for place in places}
        #: Those of the places that have their versions in an object store.
        self._objects = {place: one for place, one in found.items() if one is not None}
        self._linked: set[tuple[Path, str, int]] = set()
        #: Place -> the versions (policy, number) that its copy of the database names.
        self.named: dict[Path, set[tuple[str, int]]] = {}
        #: Name in the archive -> file.
        self.files: dict[str, Path] = {}

    def take(self, databases: Databases) -> None:
        """Make the cut.

        Raises:
            ConfigError: versions come and go faster than they can be linked.
        """
        for _ in range(_TRIES):
            self._link_all()
            self.files = databases.copy(self._work)
            self.named = databases.named
            self._link_all()
            gone = {
                (place, *one) for place, named in self.named.items() for one in named
            } - self._linked
            if not gone or gone <= self._still_named():  # nothing removed them: they were lost
                break
        else:
            raise ConfigError(
                f"Versions were published and removed {_TRIES} times while the backup was made. "
                "Try again with a higher keep_checkpoints, or while less is trained."
            )
        for place, policy, version in self._linked:
            if (policy, version) in self.named.get(place, ()):
                folder = self._folder(self._pins, place, policy, version)
                for file in folder.iterdir():
                    self.files[str(file.relative_to(self._pins))] = file
        self._note_used_names()

    def _still_named(self) -> set[tuple[Path, str, int]]:
        """Files that the databases name now."""
        found: set[tuple[Path, str, int]] = set()
        for place in self.named:
            engine = connect(self._places[place])
            with engine.connect() as connection:
                found |= {(place, *one) for one in named_versions(connection)}
            engine.dispose()
        return found

    @staticmethod
    def _folder(root: Path, place: Path, policy: str, version: int) -> Path:
        return root / place / "adapters" / policy / str(version)

    def _link_all(self) -> None:
        for place in self._places:
            for policy, version in sorted(self._published(place)):
                one = (place, policy, version)
                if one not in self._linked and self._link(*one):
                    self._linked.add(one)

    def _published(self, place: Path) -> set[tuple[str, int]]:
        if place in self._objects:
            return self._objects[place].published()
        root = self._data_dir / place / "adapters"
        found = [(policy, name) for policy in _names(root) for name in _names(root / policy)]
        return {(policy, int(name)) for policy, name in found if name.isdecimal()}

    def _link(self, place: Path, policy: str, version: int) -> bool:
        """Link or download the files of a version; False: it was removed meanwhile."""
        source = self._folder(self._data_dir, place, policy, version)
        target = self._folder(self._pins, place, policy, version)
        target.mkdir(parents=True)
        if place in self._objects:
            is_there = True
            with contextlib.suppress(Damaged):  # said when the archive is checked
                is_there = self._objects[place].copy(policy, version, target)
            if not is_there:
                shutil.rmtree(target)
            return is_there
        try:
            for file in source.iterdir():
                os.link(file, target / file.name)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(
                f"The files of {policy}@{version} cannot be linked in {self._pins}: {error}. The "
                "file system of the data directory must have hard links."
            ) from error
        if source.is_dir():  # it is moved away before its first file is removed
            return True
        shutil.rmtree(target)
        return False

    def _note_used_names(self) -> None:
        """Write for each policy the highest number that is not in the cut, and was used before."""
        for place in self.named:
            notes = self._objects[place].deleted() if place in self._objects else {}
            for policy in _names(self._data_dir / place / "adapters" / _DELETED):
                with contextlib.suppress(FileNotFoundError):
                    note = self._data_dir / place / "adapters" / _DELETED / policy
                    notes[policy] = int(note.read_text())
            for where, policy, version in self._linked:
                if where == place and (policy, version) not in self.named[place]:
                    notes[policy] = max(version, notes.get(policy, -1))
            for policy, version in notes.items():
                note = self._work / place / "adapters" / _DELETED / policy
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(str(version))
                self.files[str(note.relative_to(self._work))] = note


def _names(folder: Path) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):
        names = [one.name for one in folder.iterdir()]
        yield from (name for name in sorted(names) if not name.startswith("."))
