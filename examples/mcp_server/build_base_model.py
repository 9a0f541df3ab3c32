"""Build the small base model that the example trains.

Run `python -m examples.mcp_server.build_base_model`. It imitates a random policy
on the example's MCP server, over data sets that are others than the demo's.

Conversations of a random policy: calls are well formed, choices are drawn by lot.

The warm start learns the language of the tools from these, and no more. Which station is read, of
which month, and which of the numbers is the answer leans to what the task says and is otherwise
left to chance, so that each is right at times and reinforcement has a choice to make.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.tools import BaseTool
from langchain_mcp_adapters.tools import load_mcp_tools
from mcp import ClientSession
from mcp.shared.memory import create_connected_server_and_client_session

from examples.mcp_server.agent import MAX_MODEL_CALLS, SYSTEM_PROMPT
from examples.mcp_server.dataset import CITIES, MEASURES, MONTHS, SITES, build
from examples.mcp_server.scripted_models import QUESTIONS, ScriptedWriter
from examples.mcp_server.server import build_server
from examples.mcp_server.session import describe
from examples.mcp_server.tasks import Task, write_tasks
from examples.support.tiny_model import Conversation, Recipe, main
from examples.support.warm_start import WarmStart

Message = dict[str, Any]
#: How often the random policy takes a choice that the task's words suggest.
LEAN = 0.4
TASKS_PER_SERVER = 300


async def call(session: ClientSession, name: str, arguments: dict[str, Any]) -> str:
    """The text that a tool returns."""
    result = await session.call_tool(name, arguments)
    return "\n".join(block.text for block in result.content if block.type == "text")


class RandomPolicy:
    """Plays one task with well-formed calls and keeps the messages in OpenAI's shape."""

    def __init__(self, rng: random.Random, task: Task, session: ClientSession) -> None:
        """Start a conversation with the system prompt and the task."""
        self._rng, self._session = rng, session
        self._words = re.findall(r"\w+", task.text)
        self._stations: list[str] = []
        self._page = ""
        self.messages: list[Message] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task.text},
        ]

    def _lean(self, choices: list[Any], suggested: Callable[[Any], bool], lean: float) -> Any:
        """One of the choices: one that the task suggests at times, else any."""
        told = [choice for choice in choices if suggested(choice)]
        return self._rng.choice(told if told and self._rng.random() < lean else choices)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        call_of = {"type": "function", "function": {"name": name, "arguments": arguments}}
        result = await call(self._session, name, arguments)
        self.messages += [
            {"role": "assistant", "content": "", "tool_calls": [call_of]},
            {"role": "tool", "content": result},
        ]
        return result

    async def _list(self) -> None:
        city = self._lean(list(CITIES), self._words.__contains__, 0.95)
        self._stations = (await self._call("stations", {"city": city})).splitlines()

    async def _read(self) -> None:
        site = self._words[self._words.index("in") - 1]
        station = self._lean(self._stations, lambda one: one.endswith(f" {site}"), LEAN)
        month = self._lean(list(MONTHS), self._words.__contains__, 0.9)
        self._page = await self._call("normals", {"station": station, "month": month})

    def _answer(self) -> None:
        values = re.findall(r"\w+ \d+", self._page)
        value = self._lean(values, lambda one: one.split()[0] in self._words, LEAN)
        self.messages.append({"role": "assistant", "content": value})

    async def play(self) -> list[Message]:
        """Play to the answer and return the messages."""
        await self._list()
        await self._read()
        for _ in range(MAX_MODEL_CALLS - 3):
            if self._rng.random() < 0.95:
                break
            await self._read()
        self._answer()
        return self.messages


async def _record(path: Path, seed: int, count: int) -> tuple[list[list[Message]], list[BaseTool]]:
    server = build_server(str(build(path, seed)))
    async with create_connected_server_and_client_session(server) as session:
        tasks = write_tasks(ScriptedWriter(), await describe(session), count, 0, seed)
        played = [
            await RandomPolicy(random.Random(f"demo-{seed}-{task.id}"), task, session).play()
            for task in tasks["train"]
        ]
        return played, await load_mcp_tools(session)


def demonstrations(
    count: int, seed: int, folder: Path
) -> tuple[list[list[Message]], list[BaseTool]]:
    """The first `count` conversations about training tasks, and the tools that the server offers.

    Each `TASKS_PER_SERVER` are about a data set of their own. The same seed gives the same.
    """
    conversations: list[list[Message]] = []
    tools: list[BaseTool] = []
    while len(conversations) < count:
        number = seed + len(conversations) // TASKS_PER_SERVER
        played, tools = asyncio.run(_record(folder / f"{number}.sqlite3", number, TASKS_PER_SERVER))
        conversations += played
    return conversations[:count], tools


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
