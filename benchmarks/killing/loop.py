"""Kills a saver again and again, and looks at what the next start finds. Needs no package.

A saver is forked from a process that has imported everything; so is the start after it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Saves that end before the one that is killed, at least and at most.
LEAST, MOST = 2, 4


def forked(work: Callable[[int], None]) -> tuple[int, Any]:
    """Run `work` in a forked process; its id, and what it writes as lines."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            work(write)
        except BaseException as error:  # noqa: BLE001 - the fork ends here, and says why
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(0)
    os.close(write)
    return pid, os.fdopen(read)


def killed(
    fill: Callable[[int], None],
    save: Callable[[Path, int], None],
    start: Callable[[Path], dict[str, Any]],
    kills: int,
    seed: int,
) -> dict[str, float]:
    """Shares of the kills after which the next start finds what it needs.

    Args:
        fill: make every weight, and every number of Adam's state, N.
        save: save that as checkpoint N.
        start: what a start loads: ``weights`` and ``optimizer``, each the one number that all of
            it is, or None.
        kills: how many.
        seed: of their moments.

    Returns:
        ``whole``: the weights are those of the last save that had ended, or of the next one;
        ``resumed``: the optimizer's state is there, too, and of the same save.
    """
    draw, whole, resumed = random.Random(seed), 0, 0
    gc.freeze()  # a collection in a fork would copy all that was imported
    for _ in range(kills):
        folder = Path(tempfile.mkdtemp(prefix="kills-"))

        def work(write: int, folder: Path = folder) -> None:
            for number in range(1, 1000):
                fill(number)
                os.write(write, b"begin\n")
                save(folder, number)
                os.write(write, b"end\n")

        pid, lines = forked(work)
        wanted, took = draw.randint(LEAST, MOST), 0.0
        for _ in range(wanted):
            assert lines.readline() == "begin\n"
            begun = time.monotonic()
            assert lines.readline() == "end\n"
            took = time.monotonic() - begun
        lines.readline()  # the next one has begun
        time.sleep(draw.uniform(0.0, took))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        saved = wanted + lines.read().count("end")

        def look(write: int, folder: Path = folder) -> None:
            os.write(write, json.dumps(start(folder)).encode())

        pid, lines = forked(look)
        found = json.loads(lines.read() or '{"weights": null, "optimizer": null}')
        os.waitpid(pid, 0)
        good = found["weights"] in (saved, saved + 1)
        whole += good
        resumed += good and found["optimizer"] == found["weights"]
        shutil.rmtree(folder)
    return {"whole": whole / kills, "resumed": resumed / kills}


def only(values: set[float]) -> float | None:
    """The one value; None if there are several, or none."""
    return values.pop() if len(values) == 1 else None
