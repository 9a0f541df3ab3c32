"""The embedded sampler: any causal language model of transformers, in a child process.

This module runs in the server's process and needs no torch; the model is in `embedded.process`.
"""

from __future__ import annotations

from typing import ClassVar

from langchain_art_server.backends.ipc.child_process import EnginePlace
from langchain_art_server.backends.ipc.fork_server import MODEL_IMPORTS
from langchain_art_server.backends.ipc.process_sampler import ProcessSampler
from langchain_art_server.config import Settings


class TransformersSampler(ProcessSampler):
    """A `Sampler`; it reads of the settings the model, device, dtype, context and `sampler`."""

    target: ClassVar[str] = "langchain_art_server.backends.embedded.process:serve"
    imports: ClassVar[tuple[str, ...]] = (
        "langchain_art_server.backends.embedded.process",
        *MODEL_IMPORTS,
    )

    def __init__(
        self, settings: Settings, replica: int | None = None, place: EnginePlace | None = None
    ) -> None:
        threads = settings.sampler.threads
        # OpenMP reads its variable when torch is imported: a later change leaves idle threads.
        env = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        super().__init__(settings, replica, place, env=env)
