"""The learner on Unsloth's kernels, as the server holds it: no torch on this side."""

from __future__ import annotations

from typing import Any, ClassVar

from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.config import Settings


class UnslothLearner(PeftLearner):
    """A `base.Learner` on a model that Unsloth loaded, in a process of its own.

    Args:
        settings: reads `model`, `device`, `dtype`, `max_model_len` and `learner`.
    """

    engine: ClassVar[str] = "langchain_art_server.backends.unsloth.learner_core:serving_engine"
    # Unsloth asks a hub for a file at each start, only to be counted.
    env: ClassVar[dict[str, str]] = {"UNSLOTH_DISABLE_STATISTICS": "1"}

    @staticmethod
    def options(settings: Settings) -> dict[str, Any]:
        """What `engine` gets."""
        return {
            "model": settings.model,
            "device": settings.device,
            "dtype": settings.dtype,
            "threads": settings.learner.threads,
            "max_model_len": settings.max_model_len,
            "load_in_4bit": settings.learner.load_in_4bit,
        }
