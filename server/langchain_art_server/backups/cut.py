"""A consistent cut of a running server's data, and the archive that it is written to.

The archive is a tar file whose first member, ``backup.json``, has all digests. It appears under its
name by one rename, when it is whole, was flushed to disk and was read back. Its files, and those
that are restored from it, are their user's alone.

A cut has each database at one moment, and its versions. Versions are pinned by hard links, so that
one which a rollback or retention removes meanwhile stays readable. That is done before the database
is copied and again after: a version is removed from the database first, and published before it is
in it, so whatever a copy names was pinned before, or is still there after. If one came and went in
between, the cut is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import sqlite3
import subprocess
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal, Self

import sqlalchemy as sa
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from sqlalchemy.exc import DBAPIError

from langchain_art._version import __version__
from langchain_art.errors import ConfigError, Damaged
from langchain_art_server.backends.models.adapter_files import manifest_bytes, sha256
from langchain_art_server.policies.adapter_store import fsync, names_in, versions_below
from langchain_art_server.storage.schema import check_schema, connect, place_of
from langchain_art_server.storage.tables import CHECKPOINTS, SCHEMA, SCHEMA_VERSION

CONTENTS = "backup.json"
#: Of this layout; another one is refused.
FORMAT = 1
#: The names that an archive may hold: below the data directory, and none that leads out of it.
_NAME = re.compile(
    r"database\.dump|(tenants/[a-z0-9][a-z0-9-]*/)?"
    r"(art\.sqlite3|adapters/(\.deleted/{0}|{0}/[0-9]+/{0}))".format(r"[a-z0-9][a-z0-9._-]*")
)
_PART = 1 << 20


@dataclass(frozen=True)
class Contents:
    """Contents of ``backup.json`` in an archive."""

    time: str
    """Time of the cut: ISO 8601, UTC."""
    database: Literal["sqlite", "postgresql"]
    files: dict[str, str]
    """SHA-256 of each file, in hex, by its name below the data directory."""
    versions: dict[str, list[str]]
    """The versions that each tenant's database names, by its directory; ``.``: the server's own."""
    schema: int = SCHEMA_VERSION
    langchain_art: str = __version__
    format: int = FORMAT

    @classmethod
    def read(cls, archive: Path, tar: tarfile.TarFile) -> Self:
        """The contents of an archive, from its first member.

        Raises:
            Damaged: they are not what was written.
            ConfigError: it is no backup, or one of another release.
        """
        first = tar.next()
        file = tar.extractfile(first) if first is not None and first.name == CONTENTS else None
        if file is None:
            raise ConfigError(
                f"got {str(archive)!r}, expected an archive that `langchain-art backup` made: its "
                f"first file is not {CONTENTS}"
            )
        written = file.read()
        damaged = Damaged(f"{archive} is damaged: {CONTENTS} is not what was written.")
        try:
            known = from_json(written)
            if manifest_bytes(known) != written:
                raise damaged
            del known["sha256"]
            if known["format"] != FORMAT or known["schema"] != SCHEMA_VERSION:
                raise ConfigError(
                    f"{archive} was made by langchain-art {known['langchain_art']}, with format "
                    f"{known['format']} and schema version {known['schema']}; this is "
                    f"{__version__}, with {FORMAT} and {SCHEMA_VERSION}. Restore it with that one."
                )
            return TypeAdapter(cls).validate_python(known)
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            if isinstance(error, ConfigError):
                raise
            raise damaged from error


def write_archive(
    target: Path, files: Mapping[str, Path], contents: Mapping[str, object]
) -> Contents:
    """Write `files`, by their names in the archive, and flush it to disk.

    `contents` are the fields of `Contents` but for `files`. Returns them all.
    """
    digests = {name: sha256(path) for name, path in sorted(files.items())}
    whole = Contents(files=digests, **contents)  # type: ignore[arg-type]
    about = manifest_bytes(asdict(whole))
    with target.open("xb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(_member(CONTENTS, len(about)), io.BytesIO(about))
        for name in digests:
            with files[name].open("rb") as one:
                tar.addfile(_member(name, os.fstat(one.fileno()).st_size), one)
    target.chmod(0o600)
    fsync(target)
    return whole


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    return member


def unpack(archive: Path, folder: Path) -> Contents:
    """Write the files of an archive below an empty `folder`, flushed to disk, and check each.

    Raises:
        Damaged: the archive, or a file of it, is not what was written; names the file.
        ConfigError: it is no backup, or one of another release.
    """
    try:
        with tarfile.open(archive, mode="r:") as tar:
            contents = Contents.read(archive, tar)
            missing = dict(contents.files)
            while (member := tar.next()) is not None:
                expected = missing.pop(member.name, None)
                file = tar.extractfile(member) if member.isreg() else None
                if expected is None or file is None or not _NAME.fullmatch(member.name):
                    raise Damaged(
                        f"{archive} is damaged: {CONTENTS} does not name {member.name!r:.200}."
                    )
                if _write(file, folder / member.name) != expected:
                    raise Damaged(
                        f"{archive} is damaged: {member.name} has another SHA-256 than when it "
                        "was backed up. Restore another backup."
                    )
    except (tarfile.TarError, EOFError) as error:
        raise Damaged(f"{archive} is damaged, or is no backup: {error}.") from error
    if missing:
        raise Damaged(f"{archive} is damaged: {min(missing)} is missing. Restore another backup.")
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            fsync(path)
    return contents


def _write(file: IO[bytes], path: Path) -> str:
    """Write a file and flush it. Returns its SHA-256, in hex."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = hashlib.sha256()
    with path.open("xb") as copy:
        while part := file.read(_PART):
            found.update(part)
            copy.write(part)
        copy.flush()
        os.fsync(copy.fileno())
    return found.hexdigest()


#: The directories of `AdapterStore` that hold no versions.
_DELETED = ".deleted"
#: Cuts that are made, at most, because versions came and went meanwhile.
_TRIES = 20
SQLITE, DUMP = "art.sqlite3", "database.dump"
_REPEATABLE = {"isolation_level": "REPEATABLE READ"}
_NO_PROGRAM = (
    "got a database of PostgreSQL, whose program {0!r} is not on the PATH. Install its client "
    "(Debian: postgresql-client), of the server's release or a later one. A cut by hand that "
    "matches the adapters: `cp -al DATA_DIR/adapters COPY` first, then pg_dump, then the same cp "
    "with -n for what was published meanwhile; or stop the server for it."
)


class Cut:
    """The files of a cut, below `pins` (hard links) and `work` (copies of databases).

    `places` are the directories of a server and of its tenants, relative to the data directory,
    with the URLs of their databases.
    """

    def __init__(self, data_dir: Path, places: dict[Path, str], pins: Path, work: Path) -> None:
        self._data_dir, self._places = data_dir, places
        self._pins, self._work = pins, work
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
            for policy, version in sorted(versions_below(self._data_dir / place / "adapters")):
                one = (place, policy, version)
                if one not in self._linked and self._link(*one):
                    self._linked.add(one)

    def _link(self, place: Path, policy: str, version: int) -> bool:
        """Link the files of a version; False: it was removed meanwhile."""
        source = self._folder(self._data_dir, place, policy, version)
        target = self._folder(self._pins, place, policy, version)
        target.mkdir(parents=True)
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
            notes: dict[str, int] = {}
            for policy in names_in(self._data_dir / place / "adapters" / _DELETED):
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


def named_versions(connection: sa.Connection) -> set[tuple[str, int]]:
    """The versions (policy, number) that a database names."""
    rows = connection.execute(sa.select(CHECKPOINTS.c.policy, CHECKPOINTS.c.version))
    return {(row.policy, row.version) for row in rows}


class Databases(ABC):
    """Databases of a server: by the place of each tenant's directory, its URL."""

    def __init__(self, places: dict[Path, str]) -> None:
        self.places = places
        #: Place -> the versions that its copy names.
        self.named: dict[Path, set[tuple[str, int]]] = {}

    @abstractmethod
    def copy(self, folder: Path) -> dict[str, Path]:
        """Write the copies below a folder, over earlier ones. Returns name in archive -> file.

        Raises:
            ConfigError: a database is not one of this server.
            Damaged: one could not be read, or its copy not be written.
        """

    def _read(self, place: Path, url: str, snapshot: str | None = None) -> bool:
        """Note what a database names; False: it has no tables, for its tenant is being made."""
        engine = connect(url)
        with engine.connect().execution_options(
            **({} if snapshot is None else _REPEATABLE)
        ) as connection:
            if snapshot is not None:
                connection.exec_driver_sql(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
            made = place == Path() or sa.inspect(connection).has_table(SCHEMA.name)
            self.named.pop(place, None)
            if made:
                check_schema(connection)
                self.named[place] = named_versions(connection)
        engine.dispose()
        return made


class SqliteFiles(Databases):
    """Each copied by SQLite's backup, in one read transaction; the server goes on meanwhile."""

    def copy(self, folder: Path) -> dict[str, Path]:
        """See `Databases.copy`."""
        files: dict[str, Path] = {}
        for place, url in self.places.items():
            file, target = Path(sa.make_url(url).database or ""), folder / place / SQLITE
            if place != Path() and not file.is_file():
                continue  # the tenant is being made
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            engine = connect(url)
            try:
                with engine.connect() as connection, closing(sqlite3.connect(target)) as copy:
                    source = connection.connection.driver_connection
                    source.backup(copy)  # type: ignore[union-attr] - it is sqlite3's
                if self._read(place, f"sqlite:///{target}"):
                    files[str(place / SQLITE)] = target
            except (sqlite3.Error, DBAPIError) as error:
                why = error.orig if isinstance(error, DBAPIError) else error
                free = shutil.disk_usage(folder).free
                raise Damaged(
                    f"{file} could not be copied to {folder}, whose disk has {free} bytes free: "
                    f"{why}. See that the disk is not full, and what `langchain-art scrub` says."
                ) from error
            finally:
                engine.dispose()
        return files


class PostgresDump(Databases):
    """All schemas in one dump, and what it names, of one exported snapshot."""

    def copy(self, folder: Path) -> dict[str, Path]:
        """See `Databases.copy`."""
        program, target = _program("pg_dump"), folder / DUMP
        target.unlink(missing_ok=True)
        engine = connect(self.places[Path()])
        with engine.connect().execution_options(**_REPEATABLE) as connection:
            snapshot = str(connection.scalar(sa.text("SELECT pg_export_snapshot()")))
            for place, url in self.places.items():
                self._read(place, url, snapshot)
            options = ["--format=custom", f"--snapshot={snapshot}", f"--file={target}"]
            _run([program, *options], self.places[Path()])
        engine.dispose()
        return {DUMP: target}


def check_dump(dump: Path) -> None:
    """Read a dump to its end. Raises ConfigError."""
    _run([_program("pg_restore"), "--file=/dev/null", str(dump)], None)


def load_dump(dump: Path, url: str) -> None:
    """Load a dump into an empty database, all of it or nothing. Raises ConfigError."""
    program, engine = _program("pg_restore"), connect(url)
    with engine.connect() as connection:
        if tables := sa.inspect(connection).get_table_names():
            raise ConfigError(
                f"got the database {place_of(engine)}, which has the table {tables[0]!r}; expected "
                "an empty one: make it with createdb."
            )
    engine.dispose()
    options = ["--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges"]
    _run([program, *options, str(dump)], url)


def _program(name: str) -> str:
    if (found := shutil.which(name)) is None:
        raise ConfigError(_NO_PROGRAM.format(name))
    return found


def _run(argv: Sequence[str], url: str | None) -> None:
    """Run a program of PostgreSQL; with a `url`, on that database."""
    environment = dict(os.environ)
    if url is not None:
        whole = sa.make_url(url).set(drivername="postgresql")
        if whole.password is not None:
            environment["PGPASSWORD"] = str(whole.password)  # not for all to read in `ps`
        argv = [*argv, f"--dbname={whole._replace(password=None).render_as_string(False)}"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip() or f"it ended with status {done.returncode}"
        raise ConfigError(f"{Path(argv[0]).name} failed: {said}")
