"""What a prompt tells the conformance model to say."""

from __future__ import annotations

import json
from typing import Any

MARK = "SCRIPT "


def script(*steps: Any, intro: str = "") -> str:
    """A message's text with a script in it."""
    return f"{intro} {MARK}{json.dumps(steps, ensure_ascii=False)}".strip()
