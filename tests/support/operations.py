"""Numbers what this process does to files below a folder, and keeps what of it is on disk.

Operations are: a file opened for writing, a rename, link, removal, new or removed directory, a
flush (`os.fsync`), and a transaction of the database. `Operations.before` is called before each,
and may raise or end the process. What a crash of the machine leaves is made by `after_crash`.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Mode = Literal["keep", "drop", "tear", "reorder"]
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Operations:
    """What is done below `root`, while it is `watched` (one at a time)."""

    def __init__(self, root: Path, ignored: tuple[str, ...] = ()) -> None:
        self.root = root
        self._ignored = ignored  # ends of names: a database's own files
        self.names: list[str] = []
        self.before: Callable[[int, str], None] = lambda _number, _name: None
        self._lock = threading.RLock()
        #: By inode: content of files, and entries of directories, when they were last flushed.
        self._files: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, int]] = {}
        for folder in [root, *filter(Path.is_dir, root.rglob("*"))]:
            self._flushed(str(folder))
        for file in filter(Path.is_file, root.rglob("*")):
            self._flushed(str(file))

    def __enter__(self) -> Operations:
        _watch(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watch(None)

    def note(self, name: str) -> None:
        """An operation is about to be done."""
        with self._lock:
            self.names.append(name)
            self.before(len(self.names), name)

    def seen(self, event: str, paths: list[str]) -> None:
        mine = [path for path in paths if self._is_mine(path)]
        if mine:
            self.note(f"{event} {' '.join(os.path.relpath(path, self.root) for path in mine)}")
            if event in ("os.remove", "os.rmdir") and os.path.lexists(mine[0]):
                found = os.lstat(mine[0])
                self._entries.pop(found.st_ino, None)  # its number may be given again
                if found.st_nlink == 1:
                    self._files.pop(found.st_ino, None)

    def flush(self, path: str) -> None:
        """`os.fsync` of a path."""
        if self._is_mine(path):
            self.note(f"os.fsync {os.path.relpath(path, self.root)}")
            self._flushed(path)

    def _is_mine(self, path: str) -> bool:
        mine = path == str(self.root) or path.startswith(f"{self.root}/")
        return mine and not path.endswith(self._ignored)

    def _flushed(self, path: str) -> None:
        if os.path.isdir(path):
            found = {one.name: one.inode() for one in os.scandir(path)}
            self._entries[os.stat(path).st_ino] = found
        elif os.path.isfile(path):
            self._files[os.stat(path).st_ino] = Path(path).read_bytes()

    def after_crash(self, target: Path, mode: Mode, draw: random.Random) -> None:
        """Write to `target` what a crash of the machine now may leave.

        keep: everything; drop: what was flushed alone; tear: a part of each file that was not
        flushed; reorder: any of what was not flushed, in any part.
        """
        current: dict[int, tuple[str, bool]] = {}
        for folder, folders, files in os.walk(self.root):
            for name in [*folders, *files]:
                path = os.path.join(folder, name)
                current[os.lstat(path).st_ino] = path, name in folders
        self._write(str(self.root), target, mode, draw, current)

    def _write(
        self,
        folder: str,
        target: Path,
        mode: Mode,
        draw: random.Random,
        current: dict[int, tuple[str, bool]],
    ) -> None:
        target.mkdir()
        now = {one.name: one.inode() for one in os.scandir(folder)}
        before = self._entries.get(os.stat(folder).st_ino, {})
        kept = dict(before if mode == "drop" else now)
        if mode == "reorder":
            names = sorted(now.keys() | before.keys())
            kept = {name: (now if draw.random() < 0.5 else before).get(name) for name in names}
        kept |= {name: inode for name, inode in now.items() if name.endswith(self._ignored)}
        for name, inode in kept.items():
            path, is_folder = current.get(inode or 0, ("", False))
            if is_folder:
                self._write(path, target / name, mode, draw, current)
            elif name.endswith(self._ignored):
                shutil.copyfile(path, target / name)
            elif inode is not None:
                flushed = self._files.get(inode, b"")
                whole = Path(path).read_bytes() if path else flushed
                (target / name).write_bytes(_content(whole, flushed, mode, draw))


def _content(whole: bytes, flushed: bytes, mode: Mode, draw: random.Random) -> bytes:
    if whole == flushed or mode == "keep":
        return whole
    if mode == "drop":
        return flushed
    if mode == "tear":
        return whole[: len(whole) // 2]
    return draw.choice([flushed, whole[: draw.randrange(len(whole) + 1)], whole])


_watched: Operations | None = None
_hooked = False
_fsync = os.fsync


def _watch(operations: Operations | None) -> None:
    global _watched, _hooked
    _watched = operations
    os.fsync = _fsync if operations is None else _noted_fsync
    if not _hooked:
        sys.addaudithook(_hook)  # there is no way to take it away
        _hooked = True


def _noted_fsync(fd: Any) -> None:
    if _watched is not None:
        _watched.flush(os.readlink(f"/proc/self/fd/{fd}"))
    _fsync(fd)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str | bytes) and flags & _WRITES:
            _watched.seen("open", [_absolute(path)])
    elif event in ("os.rename", "os.link"):
        source, target, *folders = arguments
        pairs = zip((source, target), [*folders, -1, -1], strict=False)
        _watched.seen(event, [_absolute(path, folder) for path, folder in pairs])
    elif event in ("os.remove", "os.rmdir"):
        _watched.seen(event, [_absolute(*arguments)])
    elif event == "os.mkdir":
        path, _, folder = arguments
        _watched.seen(event, [_absolute(path, folder)])


def _absolute(path: Any, folder: int = -1) -> str:
    name = os.fsdecode(path)
    if folder != -1 and not os.path.isabs(name):
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    return os.path.abspath(name)
