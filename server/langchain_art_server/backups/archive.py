"""The archive of a backup: a tar file whose first member, ``backup.json``, has all digests.

It appears under its name by one rename, when it is whole, was flushed to disk and was read back.
Its files, and those that are restored from it, are their user's alone.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal, Self

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from langchain_art._version import __version__
from langchain_art.errors import ConfigError, Damaged
from langchain_art_server.backends.models.adapter_files import manifest_bytes, sha256
from langchain_art_server.policies.adapter_store import fsync
from langchain_art_server.storage.tables import SCHEMA_VERSION

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
            ConfigError: it is no backup, or of a later release than this one.
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
            if known["format"] != FORMAT or known["schema"] > SCHEMA_VERSION:
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
        ConfigError: it is no backup, or of a later release than this one.
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
