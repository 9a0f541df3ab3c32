"""Harbor's agent that is a graph of this process; Harbor imports it by its name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from langchain_art._version import __version__
from langchain_art.harbor.trials import conversation

_base: Any = import_module("harbor.agents.base")


class GraphAgent(_base.BaseAgent):
    """Hands the instruction to the trial's graph, and the environment to its tools."""

    @staticmethod
    def name() -> str:
        """Its name in Harbor's records."""
        return "langchain-art"

    def version(self) -> str:
        """Ours."""
        return __version__

    async def setup(self, environment: Any) -> None:
        """The graph is there already."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """Let the graph work on the task, or on its next step."""
        await conversation.get().answer(instruction, environment=environment)
