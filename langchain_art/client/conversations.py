"""Conversations for supervised steps: the accepted formats, converted to trajectories.

langchain-core is imported only if LangChain's messages are given.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from langchain_art.errors import ConfigError
from langchain_art.wire import Message, SFTConfig, Trajectory, TrajectoryGroup, Turn
from langchain_art.wire.identifiers import unwritable

Conversation: TypeAlias = "Trajectory | str | Mapping[str, Any] | Sequence[Any]"
"""One of

- a `Trajectory` of `capture()`, or the id of one that the server has;
- OpenAI's format for fine-tuning: ``{"messages": [...], "tools": [...]}``, ``tools`` may be
  left out. An assistant's message with ``"weight": 0`` is context and is not trained;
- a list of messages: OpenAI's, or LangChain's."""

Conversations: TypeAlias = "Path | Iterable[Conversation]"
"""Several conversations, or the path of a JSONL file with one per line."""
#: Conversations in one request, far below the limit of a request's size.
_POSTED_AT_ONCE = 64


def sft_config(config: SFTConfig | None) -> SFTConfig:
    """The config of a supervised step, or its default. Raises ConfigError."""
    config = config or SFTConfig()
    if not isinstance(config, SFTConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"got a {type(config).__name__}, expected an SFTConfig: conversations have no rewards "
            "to compare; train on groups with `train` or `Trainer.fit`"
        )
    return config


def read_conversations(given: Conversations) -> list[Trajectory | str]:
    """Conversations as trajectories, or ids of those that the server has, in their order.

    Every message of the assistant becomes a turn whose prompt is all messages before it. The id is
    a hash of the content, so a conversation that is sent again is stored once; equal ones in
    `given` get a number. Messages after the assistant's last are dropped. Raises ConfigError if
    there are none, or one is malformed or has no message of the assistant.
    """
    if isinstance(given, str | Mapping | Trajectory):
        raise ConfigError(
            f"got {given!r:.100}, expected a list of conversations, or the Path of a JSONL file; "
            "put a single one into a list"
        )
    read: list[Trajectory | str] = []
    seen: Counter[str] = Counter()
    for number, one in enumerate(read_jsonl(given) if isinstance(given, Path) else given, 1):
        where = f"{given}, line {number}" if isinstance(given, Path) else f"conversation {number}"
        if isinstance(one, Trajectory | str):
            read.append(one)
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
        read.append(found)
    if not read:
        raise ConfigError(f"got no conversations in {given!r:.100}, expected at least one")
    return read


def to_post(read: Sequence[Trajectory | str]) -> list[TrajectoryGroup]:
    """The conversations that the server may not have yet, each once, in groups to post.

    Raises ConfigError if two different runs have the same id.
    """
    known: dict[str, Trajectory] = {}
    for one in read:
        if isinstance(one, Trajectory) and known.setdefault(one.id, one) != one:
            raise ConfigError(
                f"got two different runs with the id {one.id!r}, expected an id of its own for each"
            )
    new = list(known.values())
    starts = range(0, len(new), _POSTED_AT_ONCE)
    parts = [tuple(new[start : start + _POSTED_AT_ONCE]) for start in starts]
    return [TrajectoryGroup(id="conversations", trajectories=part) for part in parts]


def read_jsonl(path: Path) -> Iterable[Any]:
    """The values of a JSONL file, empty lines skipped. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8-sig") as file:  # Windows' programs begin it with a mark
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not in UTF-8: {error}. Save it in UTF-8") from error


def _trajectory(given: Mapping[str, Any] | Sequence[Any], seen: Counter[str]) -> Trajectory:
    tools: Sequence[dict[str, Any]] = ()
    messages: Any = given
    if isinstance(given, Mapping):
        if unknown := sorted(set(given) - {"messages", "tools", "parallel_tool_calls"}):
            raise ValueError(f"got the fields {unknown}, expected `messages` and maybe `tools`")
        messages, tools = given["messages"], given.get("tools") or ()
    plain = _plain(messages)
    if (why := unwritable({"messages": plain, "tools": tools})) is not None:
        raise ValueError(why)
    text = json.dumps([plain, list(tools)], ensure_ascii=False)  # templates show their order
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    seen[digest] += 1
    name = f"conversation:{digest}" + (f":{seen[digest]}" if seen[digest] > 1 else "")
    return Trajectory(id=name, turns=_turns(plain, tuple(tools)))


def _turns(messages: Sequence[Message], tools: tuple[dict[str, Any], ...]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    prompt: list[Message] = []
    for message in messages:
        weight = message.get("weight", 1)
        shown = {key: value for key, value in message.items() if key != "weight"}
        if weight not in (0, 1):
            raise ValueError(f"got weight={weight!r}, expected 0 (context only) or 1")
        if message["role"] == "assistant" and weight:
            extends = len(turns) - 1 if turns else None
            turns.append(
                Turn(messages=tuple(prompt), reply=shown, tools=tools, extends=extends, ours=False)
            )
            prompt = []
        else:
            prompt.append(shown)
    return tuple(turns)


def _plain(messages: Sequence[Any]) -> list[Message]:
    if isinstance(messages, str) or not messages:
        raise ValueError(f"got the messages {messages!r:.100}, expected a list of at least one")
    if all(isinstance(message, Mapping) for message in messages):
        plain = [dict(message) for message in messages]
        for index, message in enumerate(plain):
            if message.get("content") is None and not message.get("tool_calls"):
                raise ValueError(
                    f"messages[{index}] has neither content nor tool_calls, but {sorted(message)}"
                )
        return plain
    # langchain-core, on first use
    from langchain_core.messages import convert_to_messages  # noqa: PLC0415

    from langchain_art.text_messages import openai_message  # noqa: PLC0415

    return [openai_message(message) for message in convert_to_messages(messages)]
