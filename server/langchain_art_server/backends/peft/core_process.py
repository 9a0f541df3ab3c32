"""A process that does nothing but learn: its threads and torch's determinism. Child side only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import transformers

from langchain_art_server.backends.models.device import set_threads
from langchain_art_server.backends.peft.learner_core import LearnerCore

C = TypeVar("C", bound=LearnerCore)


def process_core(make: Callable[[], C], threads: int | None) -> C:
    """Make the core of a process of its own: sets torch's threads and determinism."""
    set_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    core = make()
    # On CPU the same step must give the same bytes; on GPUs some kernels have no such variant.
    torch.use_deterministic_algorithms(core.device.type == "cpu")
    return core
