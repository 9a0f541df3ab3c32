"""A racer's process: started, heard, paused while its adapter is judged, and its CPU seconds."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gateway import cpu_seconds
from benchmarks.racing.plan import Told
from tests.support.live_server import REPO
from tests.support.vllm_engine import children

#: One thread for each engine, nothing fetched, nothing reported.
QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


def both_seconds(pid: int) -> np.ndarray:
    """User and system time of a process and of all that it started, and of the process alone.

    A process that ended is counted once its parent has waited for it.
    """
    tree = sum(cpu_seconds(one, ended=True) for one in [pid, *children(pid)])
    return np.array([tree, cpu_seconds(pid)])


@dataclass(frozen=True)
class HandedOver:
    """What a racer has handed over: a step's adapter and reward; `cpu`, `own` as in `Mark`."""

    step: int
    adapter: Path
    reward: float | None
    cpu: float
    own: float


class Racer:
    """A context manager; on leaving, the process ends.

    Args:
        argv: starts it, but for the folder.
        folder: of its own; made here.
        told: its task.
    """

    def __init__(self, argv: Sequence[str | Path], folder: Path, told: Told) -> None:
        folder.mkdir(parents=True)
        told.write(folder)
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*argv, folder],
                cwd=REPO,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | QUIET,
            )
        self._spent, self._paused_at = np.zeros(2), np.zeros(2)

    def __enter__(self) -> Racer:
        return self

    def __exit__(self, *_: object) -> None:
        """What it waits for ends, and so does it; after a minute it is killed."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def hear(self) -> HandedOver:
        """The next adapter; the racer waits from then on.

        Raises:
            RuntimeError: it ended; with the end of its log.
        """
        stdout = self._process.stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith('{"step"'):
                self._spent += both_seconds(self._process.pid) - self._paused_at
                said = json.loads(line)
                cpu, own = map(float, self._spent)
                return HandedOver(said["step"], Path(said["adapter"]), said["reward"], cpu, own)
        raise RuntimeError(f"A racer ended; its log: {self._log.read_text()[-4000:]}")

    def go(self) -> None:
        """Let it go on; what it used while it waited does not count."""
        stdin = self._process.stdin
        assert stdin is not None
        self._paused_at = both_seconds(self._process.pid)
        stdin.write("go\n")
        stdin.flush()
