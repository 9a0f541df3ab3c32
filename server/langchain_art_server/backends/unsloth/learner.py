"""The learner on Unsloth's kernels, as the server holds it. No torch here."""

from __future__ import annotations

from typing import Any, ClassVar

from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.config import Settings


class UnslothLearner(PeftLearner):
    """A learner on a model that Unsloth loads, in one child process.

    Reads of the settings what `PeftLearner` does, `max_model_len` and `data_dir`.
    """

    core: ClassVar[str] = "langchain_art_server.backends.unsloth.learner_core:make_core"
    imports: ClassVar[tuple[str, ...]] = ()  # Unsloth comes first: it patches the others

    @staticmethod
    def options(settings: Settings) -> dict[str, Any]:
        """Keyword arguments of `core`."""
        return PeftLearner.options(settings) | {"max_model_len": settings.max_model_len}

    @staticmethod
    def environment(settings: Settings) -> dict[str, str]:
        """See `PeftLearner`. Without these, Unsloth does the following at each start.

        It downloads a file from a model hub, to count its users. And on a GPU it writes code into
        the current folder and imports it from there.
        """
        written = settings.data_dir.absolute() / "unsloth"
        return {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": str(written)}
