"""Start of an engine's process by the parent, with one end of a socket pair."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import langchain_art
import langchain_art_server
from langchain_art.errors import ConfigError, EngineUnavailable
from langchain_art_server.backends.ipc.fork_server import ForkRequest, ForkServer, can_fork
from langchain_art_server.backends.ipc.node_socket import NodeAddress


class ChildProcess(Protocol):
    """Common interface of `subprocess.Popen` and `ForkedProcess`."""

    @property
    def pid(self) -> int | None:
        """The process id; None if it is not known yet."""
        ...

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...

    def wait(self) -> int:
        """Wait until it has ended; returns the exit status."""
        ...


class EngineProgram:
    """Program of a child process. For the arguments see `Worker`."""

    #: Of all engines of this process, once one was forked.
    _forks: ForkServer | None = None

    def __init__(
        self,
        target: str,
        config: Mapping[str, Any],
        env: Mapping[str, str],
        imports: Sequence[str],
        python: str,
    ) -> None:
        self.target = target
        #: With which another machine makes the same (`ray.engine_host`).
        self.arguments = (target, config, env, imports, python)
        self._config, self._env, self._python = config, dict(env), python
        self._imports = imports if can_fork() else ()
        if Path(python) != Path(sys.executable):
            self._imports = ()
            self._packages = _package_links()
            paths = (self._packages.name, os.environ.get("PYTHONPATH"))
            self._env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def launch(self) -> tuple[ChildProcess, socket.socket]:
        """Start a child and return it with our end of its socket.

        Raises:
            ConfigError: its Python cannot be run.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return self._forked(theirs) if self._imports else self._started(theirs), ours
            except OSError as error:
                ours.close()
                raise ConfigError(
                    f"The engine's Python cannot be run: {error}. See that the setting `python` is "
                    "the path of one, such as /opt/learner/bin/python."
                ) from error

    def _forked(self, theirs: socket.socket) -> ChildProcess:
        kind = EngineProgram
        if kind._forks is None or not kind._forks.alive:
            kind._forks = ForkServer()
        request = ForkRequest(
            target=self.target, config=self._config, env=self._env, imports=self._imports
        )
        return kind._forks.fork(request, theirs)

    def _started(self, theirs: socket.socket) -> ChildProcess:
        channel = "langchain_art_server.backends.ipc.channel"
        argv = [self._python, "-m", channel, self.target, str(theirs.fileno())]
        # Not in a thread, where a cancelled start would lose the process; vfork is quick.
        return subprocess.Popen(
            [*argv, json.dumps(self._config)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=os.environ | self._env,
            # Ctrl-C reaches the parent only, which ends the child.
            start_new_session=True,
        )


class EnginePlace(Protocol):
    """Place where an engine's process runs: this machine (`Here`), or another one."""

    same_disk: bool
    """True if it reads the folders that this process names, after each start."""
    patience: float
    """Seconds for which work may wait until there is a place again."""
    beside: Sequence[NodeAddress]
    """Addresses where the engine finds the processes that were started beside it."""

    @property
    def problem(self) -> str | None:
        """Reason for which there is no place now, in words for anyone; None: none is known."""
        ...

    async def launch(self, program: EngineProgram) -> tuple[ChildProcess, socket.socket]:
        """Start a child and return it with our end of its socket.

        Raises:
            ConfigError: its Python cannot be run.
            NoPlace: there is none for it.
        """
        ...

    def folder(
        self, path: Path, files: Sequence[str] | None = None
    ) -> AbstractAsyncContextManager[Path]:
        """A folder's `files` (None: all) where the engine reads them, until it has.

        Raises:
            NoPlace: the engine is not there.
        """
        ...

    def made(self, path: Path) -> AbstractAsyncContextManager[Path]:
        """A folder where the engine writes, whose files are in `path` at the end. Raises NoPlace.

        Not if an exception ends it.
        """
        ...

    async def close(self) -> None:
        """Give the place back; the engine has ended."""
        ...


class NoPlace(EngineUnavailable):
    """No machine has room for the engine now. Retryable; says what is missing."""


class Here:
    """This machine."""

    same_disk, patience = True, 0.0
    beside: Sequence[NodeAddress] = ()
    problem: str | None = None

    async def launch(self, program: EngineProgram) -> tuple[ChildProcess, socket.socket]:
        """See `EnginePlace.launch`."""
        return program.launch()

    @asynccontextmanager
    async def folder(
        self, path: Path, files: Sequence[str] | None = None
    ) -> AsyncGenerator[Path, None]:
        """The folder itself."""
        yield path

    @asynccontextmanager
    async def made(self, path: Path) -> AsyncGenerator[Path, None]:
        """The folder itself."""
        yield path

    async def close(self) -> None:
        """Do nothing."""


def _package_links() -> tempfile.TemporaryDirectory[str]:
    """A folder with links to the two packages and nothing else of the server's environment."""
    folder = tempfile.TemporaryDirectory(prefix="art-packages-")
    for package in (langchain_art, langchain_art_server):
        home = Path(package.__path__[0]).resolve()
        Path(folder.name, home.name).symlink_to(home, target_is_directory=True)
    return folder
