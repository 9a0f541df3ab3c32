"""The embedded sampler: any causal language model of transformers, in a child process.

This module runs in the server's process and needs no torch; the model is in `embedded.process`.
"""

from __future__ import annotations

from typing import ClassVar

from langchain_art_server.backends.ipc.fork_server import MODEL_IMPORTS
from langchain_art_server.backends.ipc.process_sampler import ProcessSampler


class TransformersSampler(ProcessSampler):
    """A `Sampler` (see `base`) over a child process that runs transformers.

    Reads of the settings the model, device, dtype, context and `sampler`.
    """

    target: ClassVar[str] = "langchain_art_server.backends.embedded.process:serve"
    imports: ClassVar[tuple[str, ...]] = (
        "langchain_art_server.backends.embedded.process",
        *MODEL_IMPORTS,
    )
