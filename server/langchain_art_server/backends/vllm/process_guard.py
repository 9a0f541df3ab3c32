"""Holds a process group, and ends it with the program that asked for it, even after a kill -9.

Run by its path, with nothing but the standard library::

    python process_guard.py FOLDER PROGRAM ARG…

The program runs in a process group of its own. Its id is the first line on standard output.
Standard input is a pipe whose other end the asker holds: when that end closes, the asker is gone,
and the whole group is killed. (`PR_SET_PDEATHSIG` would reach the program, and not the processes
that it starts itself, which keep a GPU's memory.) At the end FOLDER, with its socket and its copies
of adapters, is removed. The exit status is the program's.

What is killed leaves its named shared memory behind. Python's multiprocessing has a process that
removes it when all that could are gone, the resource tracker: it is the one that is not killed.
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
#: Seconds for the trackers to end by themselves.
_TIDYING = 5.0


def main() -> int:
    """Start the program, wait for its end or the asker's, leave nothing behind."""
    folder, argv = sys.argv[1], sys.argv[2:]
    if sys.platform == "linux":  # orphans of the group come to us, and are waited for below
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
    """Kill a process group, and let the resource trackers in it do their work."""
    deadline = time.monotonic() + _TIDYING
    while (members := _members(group)) and time.monotonic() < deadline:
        for pid, command in members.items():
            if _TRACKER not in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> dict[int, bytes]:
    """Those of a group that have not ended, with their command lines; where there is a /proc."""
    found: dict[int, bytes] = {}
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            with open(f"/proc/{pid}/stat", "rb") as stat:
                state, _, its_group = stat.read().rpartition(b")")[2].split()[:3]
            if int(its_group) == group and state != b"Z":
                with open(f"/proc/{pid}/cmdline", "rb") as command:
                    found[int(pid)] = command.read()
    return found


def _end_orphans() -> None:
    """Kill what left the group, and wait until all are gone."""
    children = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    with contextlib.suppress(ChildProcessError, FileNotFoundError):
        while True:
            with open(children) as listed:
                for pid in listed.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            os.wait()


if __name__ == "__main__":
    sys.exit(main())
