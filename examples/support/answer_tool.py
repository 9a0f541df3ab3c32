"""The tool that ends a run with its answer, and what a run answered by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool


# A coroutine, although nothing is awaited: LangChain runs a plain function in a thread, which costs
# more than the tool itself.
@tool(return_direct=True)
async def answer(text: str) -> str:
    """Answer the question."""
    return text


def answered(state: Mapping[str, Any]) -> str | None:
    """What a run answered. None: nothing, several times, or only with arguments that were refused.

    Args:
        state: What `ainvoke` returned.
    """
    answers = [
        message.text
        for message in state["messages"]
        if isinstance(message, ToolMessage)
        and message.name == answer.name
        and message.status == "success"
    ]
    return answers[0] if len(answers) == 1 else None
