"""A process that imports what engines import, and of which they are forked.

To import torch, transformers and PEFT is most of what the start of an engine takes on a CPU. Here
they are imported once: the server imports what the first engine needs, forks it, imports what the
next one needs besides, and so on. An engine that died runs again a few seconds sooner, and what was
imported is in memory once.

A process that CUDA was initialised in must not be forked (PyTorch's notes on multiprocessing), so
with a CUDA build of torch, and outside of Linux, engines are started as programs (`can_fork`).

The parent sends each request with two sockets: the engine's, and one on which it gets the engine's
process id and, at the end, its exit status, as lines. When the parent is gone, the server ends.
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
        ours, theirs = socket.socketpair()
        with theirs:
            sockets = [engine.fileno(), theirs.fileno()]
            socket.send_fds(self._ours, [json.dumps(request).encode()], sockets)
        return ForkedProcess(ours)


class ForkedProcess:
    """A forked engine: the part of `subprocess.Popen` that its parent uses."""

    def __init__(self, server: socket.socket) -> None:
        self._socket, self._lines, self._lock = server, b"", threading.RLock()
        server.setblocking(False)
        self._pid: int | None = None
        self._pidfd: int | None = None
        self._status: int | None = None
        #: True if the fork server was killed, so that the status is unknown.
        self._server_died = False

    @property
    def pid(self) -> int | None:
        """Process id; None until it was forked, which waits for the imports."""
        self.poll()
        return self._pid

    def poll(self) -> int | None:
        """Exit status; negative for a signal, None while it runs."""
        with self._lock:
            while (
                self._status is None and not self._server_died and _is_ready(self._socket.fileno())
            ):
                self._receive(self._socket.recv(64))
            running = self._pidfd is not None and not _is_ready(self._pidfd)
            if self._server_died and not running and self._status is None:
                self._end(-signal.SIGKILL)
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
        while True:
            with self._lock:
                if (status := self.poll()) is not None:
                    return status
                told = self._pidfd if self._server_died and self._pidfd else self._socket.fileno()
                told = os.dup(told)  # another thread that polls may close it
            try:
                _is_ready(told, wait=True)
            finally:
                os.close(told)

    def _receive(self, data: bytes) -> None:
        self._server_died = not data
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in map(int, lines):
            if self._pid is None:
                self._pid = line
                with contextlib.suppress(ProcessLookupError):
                    self._pidfd = os.pidfd_open(line)
            else:
                self._end(line)

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
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    # No handler: the loop reads the signal from where `set_wakeup_fd` writes to.
    signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
    signal.set_wakeup_fd(wakes.fileno())
    told: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _reap(told)
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
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (control, woken, wakes, tell, *told.values()):
                one.close()
            return request, engine
        engine.close()
        try:
            tell.sendall(b"%d\n" % pid)
            told[pid] = tell
        except OSError:  # it is not wanted any more
            os.kill(pid, signal.SIGKILL)
            tell.close()


def _reap(told: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):  # there are no more
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            if tell := told.pop(pid, None):
                with contextlib.suppress(OSError), tell:  # the parent is gone
                    tell.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def main() -> None:
    """Be the server, which this module is when it is run; in a forked process, be the engine."""
    gc.disable()  # see `import_function`
    # Threads of numpy's linear algebra do not keep it from being forked: it restarts them.
    warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
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
