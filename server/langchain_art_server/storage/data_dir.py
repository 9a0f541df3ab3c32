"""The data directory: this server's alone, and its user's."""

from __future__ import annotations

import fcntl
import io
import logging
from pathlib import Path

from langchain_art.errors import ConfigError

log = logging.getLogger(__name__)


def make_private(data_dir: Path) -> None:
    """Take others' rights to what an earlier release, or an umask, left open."""
    opened = [data_dir, *data_dir.glob("adapters")]
    files = [
        path for name in ("art.sqlite3*", "lock", "vllm*.log*") for path in data_dir.glob(name)
    ]
    for path, mode in [*((one, 0o700) for one in opened), *((one, 0o600) for one in files)]:
        if path.stat().st_mode & 0o077:
            try:
                path.chmod(mode)
            except PermissionError:
                log.warning("%s is another user's: its rights stay as they are.", path)


def own(data_dir: Path, *, shared: bool = False) -> io.TextIOWrapper:
    """Lock the data directory; if `shared`, servers of the same fleet may use it, too.

    Raises ConfigError if another server has it.
    """
    handle = (data_dir / "lock").open("a+")  # NFS wants a shared lock's file open for reading
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise ConfigError(
            f"Another server uses {data_dir}. Stop it, or give this one another --data-dir"
            f"{', or set fleet = true in its settings, too' if shared else ''}."
        ) from error
    return handle
