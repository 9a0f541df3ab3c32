"""vLLM's API server on a CPU, whose engine and worker are forked from it.

Run by its path, in vLLM's own Python, with the options of the API server::

    python forked_start.py --model MODEL …

On a CPU, vLLM spawns them, each of which imports torch, transformers and vLLM again: two thirds of
a start's CPU time. It does so for workers that are bound to cores, whose environment differs; ours
are not bound. Elsewhere it forks, too, before OpenMP has run anything in parallel.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import runpy
import sys
import warnings
from multiprocessing import resource_tracker
from typing import Any

SERVER = "vllm.entrypoints.openai.api_server"
#: The server and, beside what it imports, what the engine and the worker do.
_MODULES = (
    SERVER,
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


def main() -> None:
    """Import everything, then be the API server."""
    sys.path[0] = ""  # as `python -m` has it, not the folder of this file
    # Imported modules stay: the collector of cycles would look through them in vain, meanwhile and
    # from then on, and in a forked process it would copy their memory.
    gc.disable()
    with contextlib.suppress(ImportError):  # of another version of vLLM, or of none: see below
        # Before the other modules, which import the function by its name.
        system: Any = importlib.import_module("vllm.utils.system_utils")
        system.get_mp_context = lambda: multiprocessing.get_context("fork")
        for module in _MODULES:
            importlib.import_module(module)
    gc.freeze()
    gc.enable()
    # One for all of them, as if they were spawned. The engine's own would be killed with it, and
    # leave the worker's shared memory behind.
    resource_tracker.ensure_running()
    warnings.filterwarnings("ignore", ".*found in sys.modules after import", RuntimeWarning)
    runpy.run_module(SERVER, run_name="__main__")


if __name__ == "__main__":
    main()
