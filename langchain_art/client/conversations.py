"""Conversations to learn from by imitation: in what shape they may come, and as trajectories.

No framework is loaded unless LangChain's messages are given.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from langchain_art.errors import ConfigError
from langchain_art.wire import Message, Trajectory, Turn

Conversation: TypeAlias = "Trajectory | str | Mapping[str, Any] | Sequence[Any]"
"""One of

- a `Trajectory`, as `capture()` gives it, or the id of one that the server has;
- OpenAI's format for fine-tuning: ``{"messages": [...], "tools": [...]}``, tools left out if there
  are none. An assistant's message with ``"weight": 0`` is context and is not learned;
- a list of messages: OpenAI's, or LangChain's."""

Conversations: TypeAlias = "Path | Iterable[Conversation]"
"""Several of them, or the path of a JSONL file with one in each line."""


def read_conversations(given: Conversations) -> list[Trajectory | str]:
    """Conversations as trajectories, or ids of those that the server has, in their order.

    Every message of the assistant becomes a turn that is asked with all before it. A conversation's
    id is made of its content, so that it is stored once however often it is sent; equal ones in
    `given` are told apart by a number. Messages after the assistant's last teach nothing.

    Raises:
        ConfigError: there are none, or one is malformed or has no message of the assistant; says
            which.
    """
    if isinstance(given, str | Mapping | Trajectory):
        raise ConfigError(
            f"got {given!r:.100}, expected a list of conversations, or the Path of a JSONL file; "
            "put a single one into a list"
        )
    told: list[Trajectory | str] = []
    seen: Counter[str] = Counter()
    for number, one in enumerate(read_jsonl(given) if isinstance(given, Path) else given, 1):
        where = f"{given}, line {number}" if isinstance(given, Path) else f"conversation {number}"
        if isinstance(one, Trajectory | str):
            told.append(one)
            continue
        try:
            found = _trajectory(one, seen)
        except (KeyError, TypeError, ValueError) as error:  # pydantic's ValidationError included
            raise ConfigError(
                f"{where} is no conversation: {type(error).__name__}: {error}"
            ) from error
        if not found.turns:
            raise ConfigError(
                f"{where} has no message of the assistant, so there is nothing to learn from it"
            )
        told.append(found)
    if not told:
        raise ConfigError(f"got no conversations in {given!r:.100}, expected at least one")
    return told


def read_jsonl(path: Path) -> Iterable[Any]:
    """The values of a JSONL file, empty lines skipped. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _trajectory(given: Mapping[str, Any] | Sequence[Any], seen: Counter[str]) -> Trajectory:
    tools: Sequence[dict[str, Any]] = ()
    messages: Any = given
    if isinstance(given, Mapping):
        if unknown := sorted(set(given) - {"messages", "tools", "parallel_tool_calls"}):
            raise ValueError(f"got the fields {unknown}, expected `messages` and maybe `tools`")
        messages, tools = given["messages"], given.get("tools") or ()
    plain = _plain(cast("Sequence[Any]", messages))
    text = json.dumps([plain, list(tools)], ensure_ascii=False)  # templates show their order
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    seen[digest] += 1
    name = f"conversation:{digest}" + (f":{seen[digest]}" if seen[digest] > 1 else "")
    return Trajectory(id=name, turns=_turns(plain, tuple(tools)))


def _turns(messages: Sequence[Message], tools: tuple[dict[str, Any], ...]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    asked: list[Message] = []
    for message in messages:
        weight = message.get("weight", 1)
        shown = {key: value for key, value in message.items() if key != "weight"}
        if weight not in (0, 1):
            raise ValueError(f"got weight={weight!r}, expected 0 (context only) or 1")
        if message["role"] == "assistant" and weight:
            extends = len(turns) - 1 if turns else None
            turns.append(
                Turn(messages=tuple(asked), reply=shown, tools=tools, extends=extends, ours=False)
            )
            asked = []
        else:
            asked.append(shown)
    return tuple(turns)


def _plain(messages: Sequence[Any]) -> list[Message]:
    """Messages as OpenAI writes them."""
    if isinstance(messages, str) or not messages:
        raise ValueError(f"got the messages {messages!r:.100}, expected a list of at least one")
    if all(isinstance(message, Mapping) for message in messages):
        return [dict(cast("Mapping[str, Any]", message)) for message in messages]
    # langchain-core, on first use
    from langchain_core.messages import convert_to_openai_messages  # noqa: PLC0415

    return convert_to_openai_messages(list(messages), text_format="string")
