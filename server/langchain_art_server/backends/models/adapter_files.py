"""The files of an adapter's directory, and the identity of an adapter."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
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


@dataclass(eq=False, kw_only=True)
class LoadedAdapter:
    """An adapter that a sampler has loaded from `path`.

    `users` is the number of calls on it. A `retired` one was unloaded, and is freed without users.
    """

    name: str
    path: Path
    users: int = 0
    retired: bool = False
