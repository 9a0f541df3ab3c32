"""A process that imports what engines import, and of which they are forked.

To import torch, transformers and PEFT is most of what the start of an engine takes on a CPU. Here
they are imported once: the server imports what the first engine needs, forks it, imports what the
next one needs besides, and so on. An engine that died runs again a few seconds sooner, and what was
imported is in memory once.

A process that CUDA was initialised in must not be forked (PyTorch's notes on multiprocessing), so
with a CUDA build of torch, and outside of Linux, engines are started as programs (`can_fork`).

The parent sends each request with two sockets: the engine's, and one on which it gets the engine's
process id with a pidfd and, at the end, its exit status. When the parent is gone, the server ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from langchain_art_server.backends.ipc.channel import run_engine

#: What every model of transformers imports when it is loaded.
MODEL_IMPORTS = ("transformers.modeling_layers", "transformers.generation.utils")
_MOST = 1 << 17  # bytes of a request: an engine's settings


#: Process to fork: a target that is run with a config, with variables added, after some imports.
ForkRequest = tuple[str, Mapping[str, Any], Mapping[str, str], Sequence[str]]


@cache
def can_fork() -> bool:
    """True if engines that use the torch of this environment can be forked."""
    try:
        return sys.platform == "linux" and "+cpu" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


class ForkServer:
    """The parent's side. The server is started at once, and ends with its parent."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                # Ctrl-C reaches the parent only, which ends the engines.
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """True if it can fork. If it was killed, its engines go on."""
        return self._process.poll() is None

    def fork(self, request: ForkRequest, engine: socket.socket) -> ForkedProcess:
        """Have an engine forked, with one end of its socket. Raises OSError if the server died."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            sockets = [engine.fileno(), theirs.fileno()]
            socket.send_fds(self._ours, [json.dumps(request).encode()], sockets)
        return ForkedProcess(ours)


class ForkedProcess:
    """A forked engine: the part of `subprocess.Popen` that its parent uses."""

    def __init__(self, server: socket.socket) -> None:
        self._socket, self._lock = server, threading.RLock()
        self._pid: int | None = None
        self._pidfd: int | None = None
        self._status: int | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None until it was forked, which waits for the imports."""
        self.poll()
        return self._pid

    def poll(self) -> int | None:
        """Exit status; negative for a signal, None while it runs. A killed server tells none."""
        with self._lock:
            while self._status is None and _is_ready(self._socket.fileno()):
                said, fds, _, _ = socket.recv_fds(self._socket, 16, 1)
                if fds:
                    self._pid, self._pidfd = int(said), fds[0]
                elif said or self._pidfd is None or _is_ready(self._pidfd):
                    self._end(int(said or -signal.SIGKILL))
                else:  # the server was killed, and the engine goes on
                    break
        return self._status

    def kill(self) -> None:
        """Kill it. One that is not forked yet ends as soon as it begins."""
        with self._lock:
            if self.poll() is not None:
                return
            if self._pidfd is None:
                self._end(-signal.SIGKILL)
                return
            with contextlib.suppress(ProcessLookupError):  # it has ended, which is reported next
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until it has ended; returns its exit status."""
        while (status := self.poll()) is None:
            if self._pidfd is not None:
                _is_ready(self._pidfd, wait=True)
            _is_ready(self._socket.fileno(), wait=True)
        return status

    def _end(self, status: int) -> None:
        self._status = status
        self._socket.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _is_ready(fd: int, *, wait: bool = False) -> bool:
    """True if something can be read. `select.select` would take no number above 1,023."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if wait else 0))


def serve(control: socket.socket) -> tuple[ForkRequest, socket.socket]:
    """Fork what is asked for. Returns in the forked processes only, with the engine's socket."""
    engines: dict[int, tuple[int, socket.socket]] = {}  # by pidfd, which is ready at its end
    while True:
        ready, _, _ = select.select([control, *engines], [], [])
        for pidfd in engines.keys() & set(ready):
            pid, tell = engines.pop(pidfd)
            os.close(pidfd)
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(OSError), tell:  # the parent is gone
                tell.send(b"%d" % os.waitstatus_to_exitcode(status))
        if control not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, _MOST, 2)
        if not message:
            os._exit(0)  # the parent is gone; the engines see it by themselves
        request: ForkRequest = json.loads(message)
        *_, imports = request
        engine, tell = (socket.socket(fileno=fd) for fd in fds)
        for module in imports:
            with contextlib.suppress(ImportError):  # the engine will fail by it, and say so
                importlib.import_module(module)
        gc.freeze()
        if (pid := os.fork()) == 0:
            for pidfd, (_, other) in engines.items():
                os.close(pidfd)
                other.close()
            control.close()
            tell.close()
            return request, engine
        engine.close()
        pidfd = os.pidfd_open(pid)
        engines[pidfd] = pid, tell
        try:
            socket.send_fds(tell, [b"%d" % pid], [pidfd])
        except OSError:  # it is not wanted any more
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Be the server, which this module is when it is run; in a forked process, be the engine."""
    gc.disable()  # see `import_function`
    # Threads of numpy's linear algebra do not keep it from being forked: it restarts them.
    warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, engine = serve(socket.socket(fileno=int(sys.argv[1])))
    os.setsid()
    target, config, env, _ = request
    os.environ.update(env)
    # What `ps` and `top` show beside the server's command line, which all of them have.
    Path("/proc/self/comm").write_text(target.split(".")[-2][:15])
    gc.enable()
    run_engine(target, engine, config)


if __name__ == "__main__":
    main()
