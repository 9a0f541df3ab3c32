"""The files of an adapter's directory, their digests, and the identity of an adapter."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from langchain_art.errors import Damaged

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST = "manifest.json"
SAMPLED_FILES = (CONFIG_FILE, WEIGHTS_FILE)  # what a sampler reads
#: Layers of latent attention that vLLM merges into their neighbours: LoRA on them has no effect.
ABSORBED = frozenset({"kv_b_proj"})

Identity = tuple[tuple[int, int, int, int] | None, ...]


def identity(folder: Path) -> Identity:
    """Device, inode, size and modification time of each file of an adapter.

    It survives a rename of the folder, and differs when a path is used for other files.
    """

    def one(name: str) -> tuple[int, int, int, int] | None:
        with contextlib.suppress(FileNotFoundError):
            stat = (folder / name).stat()
            return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
        return None

    return tuple(one(name) for name in (CONFIG_FILE, WEIGHTS_FILE, OPTIMIZER_FILE))


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write ``manifest.json``, with its own digest."""
    (folder / MANIFEST).write_bytes(manifest_bytes(manifest))


def check_files(folder: Path, names: Collection[str] | None = None) -> dict[str, Any]:
    """Check a published version's files (or those of `names`) against its manifest, and return it.

    Raises Damaged: a file is missing or is not what was written.
    """
    where = f"{folder.parent.name}@{folder.name} is damaged and is not used"
    for path in (folder, *(folder.iterdir() if folder.is_dir() else ())):
        if path.is_symlink():
            raise Damaged(f"{where}: {path.name} is a link, expected what was published.")
    try:
        written = (folder / MANIFEST).read_bytes()
        manifest: dict[str, Any] = from_json(written)
        whole = manifest_bytes(manifest) == written
    except (OSError, ValueError, AttributeError) as error:
        raise Damaged(f"{where}: {MANIFEST} cannot be read: {error}.") from error
    if not whole:
        raise Damaged(f"{where}: {MANIFEST} is not what was written.")
    try:
        for name, expected in manifest["files"].items():
            if (names is None or name in names) and sha256(folder / name) != expected:
                raise Damaged(f"{where}: {name} has another SHA-256 than when it was published.")
    except OSError as error:
        raise Damaged(f"{where}: {error}.") from error
    return manifest


async def check_sampled(folder: Path) -> None:
    """Check what a sampler reads of a version. One that is being made has no manifest yet."""
    if (folder / MANIFEST).exists():
        await asyncio.to_thread(check_files, folder, SAMPLED_FILES)


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """A manifest as JSON, with the digest of all else that is in it."""
    about = {name: value for name, value in manifest.items() if name != "sha256"}
    digest = hashlib.sha256(to_json(about)).hexdigest()
    return to_json(about | {"sha256": digest}, indent=2)


@dataclass(eq=False, kw_only=True)
class LoadedAdapter:
    """An adapter that a sampler has loaded from `path`.

    `users` is the number of calls on it. A `retired` one was unloaded, and is freed without users.
    """

    name: str
    path: Path
    users: int = 0
    retired: bool = False
