"""Holds a process group, and ends it with the program that asked for it, even after a kill -9.

Run by its path, with nothing but the standard library::

    python vllm_guard.py FOLDER PROGRAM ARG…

The program runs in a process group of its own. Its id is the first line on standard output.
Standard input is a pipe whose other end the asker holds: when that end closes, the asker is gone,
and the whole group is killed. (`PR_SET_PDEATHSIG` would reach the program, and not the processes
that it starts itself, which keep a GPU's memory.) At the end FOLDER, with its socket and its copies
of adapters, is removed. The exit status is the program's.
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

_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Start the program, wait for its end or the asker's, leave nothing behind."""
    folder, argv = sys.argv[1], sys.argv[2:]
    if sys.platform == "linux":  # orphans of the group come to us, and are waited for below
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)

    def end_group(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

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
