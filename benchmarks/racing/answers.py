"""Calls of the tool ``answer`` in what a model wrote; the standard library only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

ANSWER = re.compile(r'<tool_call>\s*(\{"name": "answer".*?\})\s*</tool_call>', re.DOTALL)


def answers(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Arguments of the well-formed calls of ``answer``."""
    found: list[str] = []
    for message in messages:
        if message["role"] != "assistant":
            continue
        for call in ANSWER.findall(message["content"]):
            try:
                text = json.loads(call)["arguments"]["text"]
            except (ValueError, KeyError, TypeError):
                continue
            if isinstance(text, str):
                found.append(text)
    return found
