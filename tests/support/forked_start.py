"""Starts a server for 0.9 s of CPU instead of 4.3: forked where its modules are imported already.

Each process that runs tests has one process that imports what a server and its engines import, and
forks the servers. A server's engines are forked as always, from a process of its own; that one is
forked, too, instead of being started. All else is what ``python -m MODULE ARGS`` does.
"""

import atexit
import contextlib
import io
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_art.client.local_server import LocalServer
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.backends.ipc import fork_server
from langchain_art_server.backends.ipc.child_process import ChildProcess, EngineProgram
from langchain_art_server.backends.peft.learner import PeftLearner

_IMPORTS = (
    "langchain_art_server.__main__",
    "langchain_art_server.backends.unsloth.learner",
    "langchain_art_server.backends.vllm.sampler",
    *TransformersSampler.imports,
    *PeftLearner.imports,
    "tests.support.first_model",
)


class ForkedProgram:
    """A forked server: the part of `subprocess.Popen` that tests use."""

    def __init__(self, process: ChildProcess, log: Path) -> None:
        self._process, self.log = process, log
        self.stdin = io.BytesIO()  # nothing that is written there reaches it
        self.poll, self.kill = process.poll, process.kill

    @property
    def pid(self) -> int:
        while (pid := self._process.pid) is None:
            assert self.poll() is None, "it was not forked"
            time.sleep(0.01)
        return pid

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or float("inf"))
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
            time.sleep(0.01)
        return status


def start(
    module: str,
    args: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    log: Path,
    imports: Sequence[str] = (),
) -> ForkedProgram:
    """Run ``python -m module args`` in `cwd`, with `env` alone, what it says appended to `log`.

    `imports`: what it needs besides, imported before it and all later ones are forked.
    """
    log.touch()
    config = {"module": module, "args": args, "env": dict(env), "cwd": str(cwd), "log": str(log)}
    program = EngineProgram(f"{__name__}:serve", config, {}, (*_IMPORTS, *imports), sys.executable)
    process, ours = program.launch()
    ours.close()
    return ForkedProgram(process, log)


def run(
    command: Sequence[str], env: Mapping[str, str] = os.environ, **_: object
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of ``python -m MODULE`` by a fork.

    What it says is in `stdout` and in `stderr`, and shown.
    """
    python, flag, module, *args = command
    assert (python, flag) == (sys.executable, "-m"), command
    with tempfile.NamedTemporaryFile("r") as log:
        status = start(module, args, env, Path.cwd(), Path(log.name)).wait()
        said = log.read()
    sys.stdout.write(said)
    return subprocess.CompletedProcess(command, status, said, said)


def spawn(server: LocalServer) -> None:
    """`LocalServer._spawn` by a fork. The server does not end with this process."""
    module, *args = server._argv[2:]
    server._process = start(module, args, os.environ, Path.cwd(), server.log.resolve())  # type: ignore[assignment]


def serve(_channel: object, config: dict[str, Any]) -> None:
    """In the forked process: be the program."""
    log = os.open(config["log"], os.O_WRONLY | os.O_APPEND)
    for number in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(log, number)
    os.close(log)
    # As a terminal starts it: below `nohup`, pytest and its children would ignore this signal.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(config["cwd"])
    os.environ.clear()
    os.environ.update(config["env"])
    EngineProgram._forks = _ForkedForkServer()
    sys.modules.pop("langchain_art_server.__main__", None)  # it is run, not imported
    sys.argv = [config["module"], *config["args"]]
    status = 0
    try:
        runpy.run_module(config["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")  # as Python ends
    except BaseException:  # noqa: BLE001 - its traceback is what Python would show
        traceback.print_exc()
        status = 1
    # To take apart what was imported for the engines would take the server's process a second.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _ForkedForkServer(fork_server.ForkServer):
    """A server's own, forked from it before it has threads. If it is killed, a usual one comes."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._ours.close()
            os.setsid()
            sys.argv = [fork_server.__name__, str(theirs.detach())]
            try:
                fork_server.main()
            finally:
                os._exit(1)  # an engine ends its process itself
        theirs.close()

    @property
    def alive(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self._pid, os.WNOHANG)[0] == 0
        return False
