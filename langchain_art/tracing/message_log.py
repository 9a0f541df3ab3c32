"""The messages of a run, each kept once, however many prompts repeat it.

An agent's prompts grow by a reply and a tool result per call, so prompts stored whole grow with
the square of the calls. A `Transcript` interns messages (by identity, then by content) and keeps
every ``prompt + reply`` as a path in a tree; a new prompt walks the tree once and finds the deepest
earlier call that it continues. That costs a dictionary look-up per message of the prompt, and one
conversion per message that is new.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ToolMessage,
    convert_to_openai_messages,
)
from pydantic import BaseModel

from langchain_art.wire import Message

_ROOT = 0
# Content blocks of assistants, by LangChain's names and those of providers.
_REASONING = ("reasoning", "thinking")
_CALLS = ("tool_call", "tool_call_chunk", "invalid_tool_call", "function_call")
_canonical = json.JSONEncoder(sort_keys=True).encode
_DEPTH = 32  # of a graph's input or output; deeper values are written as text


def wire_message(message: BaseMessage) -> Message:
    """A LangChain message in OpenAI's dialect, as JSON can carry it.

    Reasoning and tool calls whose arguments did not parse are kept as the model said them. A
    message that LangChain cannot convert becomes its text.
    """
    try:
        form = "block" if isinstance(message.content, list) else "string"
        wire: Message = convert_to_openai_messages(message, text_format=form)
    except (ValueError, TypeError, KeyError, AttributeError):
        # Content blocks of a foreign provider: better its text than a lost turn.
        wire = {"role": message.type, "content": str(message.content)}
    if isinstance(message, ToolMessage):
        wire.pop("name", None)  # not sent, and the call that it answers says it
    if isinstance(message, AIMessage):
        if isinstance(wire["content"], list):
            _tidy(wire)
        if reasoning := message.additional_kwargs.get("reasoning_content"):
            wire["reasoning_content"] = reasoning
        for call in message.invalid_tool_calls:
            function = {"name": call["name"], "arguments": call["args"]}
            wire.setdefault("tool_calls", []).append(
                {"type": "function", "id": call["id"], "function": function}
            )
        if "tool_calls" in wire:
            wire["content"] = wire["content"] or None  # as it is sent, and as OpenAI writes it
    return wire


def _tidy(wire: Message) -> None:
    """Leaves out of an assistant's content blocks what stands beside them, or is never sent."""
    blocks: list[dict[str, Any]] = []
    for block in wire["content"]:
        kind = block.get("type")
        if kind in _REASONING:
            if isinstance(text := block.get(kind), str) and text:
                wire["reasoning_content"] = wire.get("reasoning_content", "") + text
        elif kind not in _CALLS:
            blocks.append(block)
    wire["content"] = blocks


def jsonable(value: Any, depth: int = _DEPTH) -> Any:
    """A graph's input or output as JSON can carry it; what it cannot is written as text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, BaseMessage):
        return wire_message(value)
    if depth > 0:
        if isinstance(value, BaseModel):
            value = dict(value)
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {str(key): jsonable(item, depth - 1) for key, item in items}
        if isinstance(value, list | tuple | set | frozenset):
            return [jsonable(item, depth - 1) for item in cast("Sequence[Any]", value)]
    return str(value)


@dataclass(slots=True)
class Prompt:
    """A prompt's place in the transcript."""

    atoms: list[int]
    """The messages, as numbers of the transcript."""
    end: int
    """Where the prompt ends in the tree; its reply is the next step from there."""
    extends: int | None = None
    """The call that it continues: deepest first, then the nearest in the graph, then the latest."""
    known: int = 0
    """How many of its first messages that call's prompt and reply already hold."""

    @property
    def new(self) -> list[int]:
        """What this prompt added."""
        return self.atoms[self.known :]


@dataclass(slots=True)
class _Seen:
    message: BaseMessage  # held, so that its id() stays its own
    content: Any
    atom: int


@dataclass(slots=True)
class Transcript:
    """All messages of one run and which prompt continues which. Not thread-safe: lock around it.

    Example::

        transcript = Transcript()
        first = transcript.ask([system, user], namespace="model:1")
        transcript.answer(0, first, reply, namespace="model:1")
        second = transcript.ask([system, user, reply, result], namespace="model:2")
        second.extends, [transcript.wires[atom] for atom in second.new]   # 0, [result]
    """

    wires: list[Message] = field(default_factory=list[Message])
    _seen: dict[int, _Seen] = field(default_factory=dict[int, _Seen])
    _atoms: dict[object, int] = field(default_factory=dict[object, int])
    _steps: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    _ends: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])

    def ask(self, messages: Sequence[BaseMessage], namespace: str) -> Prompt:
        """Notes a prompt and finds the earlier call that it continues."""
        atoms = [self.atom(message) for message in messages]
        node, found, known = _ROOT, None, 0
        for position, atom in enumerate(atoms, start=1):
            node = self._step(node, atom)
            if (ends := self._ends.get(node)) is not None:
                found, known = ends, position
        prompt = Prompt(atoms, node)
        if found is not None:
            near, around, anywhere = _places(namespace)
            prompt.extends = found.get(near, found.get(around, found[anywhere]))
            prompt.known = known
        return prompt

    def answer(
        self,
        index: int,
        prompt: Prompt,
        reply: BaseMessage,
        namespace: str,
        *,
        rival: bool = False,
    ) -> int:
        """Notes what call number `index` answered to its prompt; later prompts may continue it.

        A `rival` is a further answer to one request; where it says what another call said, prompts
        continue that one.
        """
        atom = self.atom(reply)
        ends = self._ends.setdefault(self._step(prompt.end, atom), {})
        for place in _places(namespace):
            ends[place] = max(ends.get(place, -1), -1 if rival and place in ends else index)
        return atom

    def atom(self, message: BaseMessage) -> int:
        """The number of this message; equal messages have one number."""
        seen = self._seen.get(id(message))
        if seen is not None and seen.content is message.content:
            return seen.atom
        wire = wire_message(message)
        try:
            key = _key(wire)
        except (TypeError, ValueError):
            wire = jsonable(wire)
            key = _key(wire)
        atom = self._atoms.setdefault(key, len(self.wires))
        if atom == len(self.wires):
            self.wires.append(wire)
        self._seen[id(message)] = _Seen(message, message.content, atom)
        return atom

    def _step(self, node: int, atom: int) -> int:
        return self._steps.setdefault((node, atom), len(self._steps) + 1)


def _key(wire: Message) -> object:
    """What equal messages have in common; most are text alone."""
    if all(isinstance(value, str) for value in wire.values()):
        return tuple(wire.items())
    return _canonical(wire)


def _places(namespace: str) -> tuple[str, str, str]:
    """The same task, the same enclosing task (a subgraph's run, a branch), anywhere."""
    return f"={namespace}", f"^{namespace.rpartition('|')[0]}", ""
