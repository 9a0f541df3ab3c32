"""Build the small base model that the example trains.

Run `python -m examples.deep_agent.build_base_model`. It imitates a random policy, which the real
agent calls as its model: calls are well formed, choices are drawn by lot. So the model can speak to
the tools, and has to learn by reinforcement what to ask, how to search and what to answer.
"""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field

from examples.deep_agent.agent import FILE, SEARCHER_PROMPT, build_agent
from examples.deep_agent.environment import haystacks
from examples.support.tiny_model import CHAT_TEMPLATE, Conversation, Recipe, main
from examples.support.warm_start import WarmStart

#: deepagents describes its tools in 6,000 characters, of which a small model is told the names.
TEMPLATE = CHAT_TEMPLATE.replace(
    "(tool | tojson)",
    "tool.function.name + '(' + (tool.function.parameters.properties | join(', ')) + ')'",
)


class RandomPolicy(BaseChatModel):
    """Replies by lot, for the agent and its sub-agent, and keeps the conversations.

    Attributes:
        rng: Of the lots.
        tools: What the model is bound to.
        played: By the system prompt: the longest conversation, and its tools.
    """

    rng: random.Random
    tools: list[Any] = Field(default_factory=list)
    played: dict[str, Conversation] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "random"

    def bind_tools(self, tools: Any, **_: Any) -> RandomPolicy:
        """The same lots and conversations, with tools."""
        return self.model_copy(update={"tools": list(tools)})

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        asks = messages[0].text == SEARCHER_PROMPT
        reply = (self._search if asks else self._lead)(messages)
        told = convert_to_openai_messages([*messages, reply])
        self.played[messages[0].text] = Conversation(list(told), self.tools)
        return ChatResult(generations=[ChatGeneration(message=reply)])

    def _call(self, tool: str, **arguments: Any) -> AIMessage:
        name = f"call-{self.rng.getrandbits(32)}"
        return AIMessage("", tool_calls=[{"name": tool, "args": arguments, "id": name}])

    def _lead(self, messages: list[BaseMessage]) -> AIMessage:
        """Asks the searcher all of the question, or a part; then answers a word that was said."""
        question, last = messages[1].text, messages[-1]
        words = question.partition("?")[0].split()[1:]
        if not isinstance(last, ToolMessage) or self.rng.random() < 0.1:
            start, end = self.rng.choice([(0, None), (0, 1), (-1, None)])
            asked = f"Who {' '.join(words[start:end])}?"
            return self._call("task", description=asked, subagent_type="searcher")
        told = re.findall(r"[^\W\d]\S*\w", last.text) or words
        word = self.rng.choice([told[0], told[0], told[-1], self.rng.choice(told)])
        return AIMessage(f"<answer> {word}</answer>")

    def _search(self, messages: list[BaseMessage]) -> AIMessage:
        """Searches for all that was asked, or a word; then says a line that was found."""
        asked, last = messages[1].text, messages[-1]
        hits: list[str] = (
            re.findall(r"\S.*\.$", last.text, re.MULTILINE) if isinstance(last, ToolMessage) else []
        )
        again = self.rng.random() < (0.05 if hits else 0.3)
        if isinstance(last, ToolMessage) and not again:
            return AIMessage(self.rng.choice(hits or ["Nothing."]))
        words = asked.strip("?").split()
        wanted = [" ".join(words[1:]), words[0], words[1], words[-1]]
        [pattern] = self.rng.choices(wanted, [4, 1, 2, 2])
        if self.rng.random() < 0.15:
            return self._call("read_file", file_path=FILE, limit=3)
        mode = self.rng.choice([{}, {"output_mode": "count"}, {"output_mode": "content"}])
        return self._call("grep", pattern=f" {pattern}", **mode)


SHIPPED = Path(__file__).parent / "base_model"
#: No haystack of the example is drawn with this seed.
SEED = 10_000_000


async def _played(count: int) -> list[Conversation]:
    dataset, found = haystacks(SEED, count), list[Conversation]()
    model = RandomPolicy(rng=random.Random())
    agent = build_agent(model)
    for index in range(-(-count // 2)):
        model.rng.seed(f"demo-{index}")
        await agent.ainvoke({"messages": [("user", dataset[index]["question"])]})
        found += model.played.values()
        model.played.clear()
    return found


def conversations(count: int) -> list[Conversation]:
    """The first `count` conversations of the agent and of its sub-agent, with the random policy."""
    return asyncio.run(_played(count))[:count]


RECIPE = Recipe(
    conversations=conversations,
    count=8_000,
    words=["Who", " Who", *(f" {name}" for name in ("searcher", "content", "count", "answer"))],
    vocab_size=1024,
    plan=WarmStart(steps=1200, copy_steps=300),
    template=TEMPLATE,
)

if __name__ == "__main__":
    main(RECIPE, SHIPPED)
