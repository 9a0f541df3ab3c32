"""The files of an adapter's directory, and what tells them from any others."""

from __future__ import annotations

import contextlib
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"

Identity = tuple[tuple[int, int, int, int] | None, ...]


def identity(folder: Path) -> Identity:
    """What tells an adapter's files from any others: it survives a rename of the folder.

    Device, inode, size and modification time of each file; a path alone may be reused.
    """

    def one(name: str) -> tuple[int, int, int, int] | None:
        with contextlib.suppress(FileNotFoundError):
            stat = (folder / name).stat()
            return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
        return None

    return tuple(one(name) for name in (CONFIG_FILE, WEIGHTS_FILE, OPTIMIZER_FILE))
