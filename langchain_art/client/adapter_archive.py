"""Downloads an adapter: a tar archive of plain files, unpacked into a new directory."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path

from langchain_art.client.http_request import Flow, Request
from langchain_art.errors import ArtError, ConfigError


def downloading(path: str, dest: Path) -> Flow[Path]:
    """Download the archive at `path` into `dest`, which is made complete or not at all."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ConfigError(f"{dest} exists and is not empty; choose another directory")
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest.parent, prefix=f".{dest.name}-") as temporary:
        archive = Path(temporary) / "adapter.tar"
        yield Request("GET", path, lambda _: None, save=archive)
        unpacked = Path(temporary) / "adapter"
        unpacked.mkdir()
        unpack(archive, unpacked)
        if dest.exists():
            dest.rmdir()
        unpacked.rename(dest)
    return dest


def unpack(archive: Path, directory: Path) -> None:
    """Extract the plain files at the top of a tar archive.

    Raises ArtError if it is broken, or has anything else: links, devices, folders or paths.
    """
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                plain = Path(member.name.removeprefix("./")).name
                if not member.isfile() or plain != member.name.removeprefix("./"):
                    raise ArtError(
                        f"The adapter's archive holds {member.name!r}, expected plain files only; "
                        "nothing was extracted"
                    )
                source = tar.extractfile(member)
                assert source is not None  # isfile() holds
                with source, (directory / plain).open("xb") as target:
                    shutil.copyfileobj(source, target)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ArtError(f"The adapter's archive cannot be read: {error}") from error
