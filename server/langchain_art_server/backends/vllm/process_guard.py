"""Runs a program in a process group, and ends the group when the parent ends, even by kill -9.

Run by its path, with only the standard library::

    python process_guard.py FOLDER PROGRAM ARG…

The group's id is the first line on standard output. Standard input is a pipe from the parent: when
it closes, the whole group is killed. (`PR_SET_PDEATHSIG` would reach the program, but not the
processes that it starts, which keep a GPU's memory.) At the end FOLDER, with its socket and copies
of adapters, is removed. The exit status is the program's.

Killed processes leave named shared memory behind. The resource tracker of Python's multiprocessing
removes it when they are gone, so it is the one process that is not killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

_PR_SET_CHILD_SUBREAPER = 36
_TRACKER = b"multiprocessing.resource_tracker"
_TRACKER_SECONDS = 5.0  # seconds for the trackers to end by themselves


def main() -> int:
    """Run the program until it or the parent ends, then end the group and remove the folder."""
    folder, argv = sys.argv[1], sys.argv[2:]
    if sys.platform == "linux":  # orphans become our children, and are waited for below
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)

    def end_group(*_: object) -> None:
        end(process.pid)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end_group()

    signal.signal(signal.SIGTERM, end_group)
    os.write(1, b"%d\n" % process.pid)
    threading.Thread(target=watch, daemon=True).start()
    code = process.wait()
    end_group()
    _end_orphans()
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def end(group: int) -> None:
    """Kill a process group, after its resource trackers have removed the shared memory."""
    deadline = time.monotonic() + _TRACKER_SECONDS
    while (members := _members(group)) and time.monotonic() < deadline:
        for pid, (_, command) in members.items():
            if _TRACKER not in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def is_stopped(group: int) -> bool:
    """True if a process of a group was stopped by a signal; False without a /proc."""
    return any(state == b"T" for state, _ in _members(group).values())


def _members(group: int) -> dict[int, tuple[bytes, bytes]]:
    """State and command line of a group's processes, by id; empty without a /proc."""
    found: dict[int, tuple[bytes, bytes]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):  # it has ended
            with open(f"/proc/{pid}/stat", "rb") as stat:
                state, _, its_group = stat.read().rpartition(b")")[2].split()[:3]
            if int(its_group) == group and state != b"Z":
                with open(f"/proc/{pid}/cmdline", "rb") as command:
                    found[int(pid)] = state, command.read()
    return found


def _end_orphans() -> None:
    children = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    with contextlib.suppress(ChildProcessError, FileNotFoundError):
        while True:
            with open(children) as listed:
                for pid in listed.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            os.wait()


if __name__ == "__main__":
    sys.exit(main())
