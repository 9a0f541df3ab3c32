"""Build the small base model that the example trains.

Run `python -m examples.mcp_server.build_base_model`. It imitates a random policy (`demonstrations`)
on the example's MCP server, over data sets that are others than the demo's.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from examples.mcp_server.agent import SYSTEM_PROMPT
from examples.mcp_server.dataset import CITIES, MEASURES, MONTHS, SITES
from examples.mcp_server.demonstrations import demonstrations
from examples.mcp_server.scripted_models import QUESTIONS
from examples.support.tiny_model import Conversation, Recipe, main
from examples.support.warm_start import WarmStart

SHIPPED = Path(__file__).parent / "base_model"
# No data set of the example is drawn with this seed, nor with one of the next hundred.
SEED = 1234


def conversations(count: int) -> list[Conversation]:
    """The first `count` conversations of a random policy on training tasks."""
    with tempfile.TemporaryDirectory() as folder:
        played, tools = demonstrations(count, SEED, Path(folder))
    return [Conversation(messages, tools) for messages in played]


def words() -> list[str]:
    """Names as they stand in tasks, calls and results."""
    asked = re.findall(r" [a-z]+", " ".join([SYSTEM_PROMPT, *QUESTIONS]))
    names = [f" {name}" for name in (*CITIES, *SITES, *MONTHS, *MEASURES)]
    plain = [*CITIES, *MONTHS, *MEASURES]
    return [*plain, *sorted({*names, *asked}), *(str(number) for number in range(10, 100))]


RECIPE = Recipe(
    conversations=conversations,
    count=6_000,
    words=words(),
    vocab_size=704,
    plan=WarmStart(steps=800, copy_steps=150),
)

if __name__ == "__main__":
    main(RECIPE, SHIPPED)
