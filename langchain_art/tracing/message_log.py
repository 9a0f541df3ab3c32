"""The messages of a run, each stored once.

Every call of an agent repeats the earlier messages, so whole prompts need memory in the square of
the calls. A `MessageLog` interns messages (by identity, then by content) and keeps every ``prompt +
reply`` in a `ConversationTree`. A new prompt costs one dictionary access per message, and one
conversion per new message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage, convert_to_openai_messages
from pydantic import BaseModel

from langchain_art.text_messages import text_message
from langchain_art.wire import Message
from langchain_art.wire.turn_links import ConversationTree, PromptPosition, nearest_call

# Content blocks of assistants, by LangChain's names and those of providers.
_REASONING = ("reasoning", "thinking")
_CALLS = ("tool_call", "tool_call_chunk", "invalid_tool_call", "function_call")
_canonical = json.JSONEncoder(sort_keys=True).encode
_DEPTH = 32  # of a graph's input or output; deeper values become text


def wire_message(message: BaseMessage) -> Message:
    """A LangChain message in OpenAI's format, as JSON values.

    Reasoning, and tool calls whose arguments could not be parsed, are kept as the model wrote them.
    A message that LangChain cannot convert is reduced to its text.
    """
    try:
        if (text := text_message(message)) is not None:
            return text
        form = "block" if isinstance(message.content, list) else "string"
        wire: Message = convert_to_openai_messages(message, text_format=form)
    except (ValueError, TypeError, KeyError, AttributeError):
        # content blocks of another provider
        wire = {"role": message.type, "content": str(message.content)}
    if isinstance(message, ToolMessage):
        wire.pop("name", None)  # not sent; the tool call has it
    if isinstance(message, AIMessage):
        if isinstance(wire["content"], list):
            _reduce_blocks(wire)
        if reasoning := message.additional_kwargs.get("reasoning_content"):
            wire["reasoning_content"] = reasoning
        for call in message.invalid_tool_calls:
            function = {"name": call["name"], "arguments": call["args"]}
            wire.setdefault("tool_calls", []).append(
                {"type": "function", "id": call["id"], "function": function}
            )
        if "tool_calls" in wire:
            wire["content"] = wire["content"] or None  # as OpenAI's format has it
    return wire


def _reduce_blocks(wire: Message) -> None:
    """Move reasoning out of an assistant's content blocks, and drop its tool calls from them."""
    blocks: list[dict[str, Any]] = []
    for block in wire["content"]:
        kind = block.get("type")
        if kind in _REASONING:
            if isinstance(text := block.get(kind), str) and text:
                wire["reasoning_content"] = wire.get("reasoning_content", "") + text
        elif kind not in _CALLS:
            blocks.append(block)
    wire["content"] = blocks


@dataclass(slots=True)
class SampledReply:
    """A reply as it was when its call ended, which the graph may change in place later."""

    reply: BaseMessage
    wire: Message
    _texts: object

    @classmethod
    def of(cls, reply: BaseMessage) -> SampledReply:
        """Of a reply that has not been changed yet."""
        wire = wire_message(reply)
        if reply.additional_kwargs or not isinstance(reply.content, str):
            wire = jsonable(wire)  # a copy of what it shares with the reply
        return cls(reply, wire, _texts_of(reply))

    def edited(self) -> Message | None:
        """The reply as it is now, if it no longer says what it said; else None.

        Its `name`, with which agents sign replies, may be another.
        """
        if self._texts is not None and self._texts == _texts_of(self.reply):
            return None  # nearly always, and sooner known
        now = wire_message(self.reply)
        if now == self.wire:
            return None
        nameless, said = {**now, "name": None}, {**self.wire, "name": None}
        return None if nameless == said or jsonable(nameless) == jsonable(said) else now


def _texts_of(reply: BaseMessage) -> object:
    """A copy of all that a reply says, if that is texts alone, in calls of tools too; else None."""
    if type(reply) is not AIMessage or reply.additional_kwargs or reply.invalid_tool_calls:
        return None
    calls: list[object] = []
    for call in reply.tool_calls:
        if type(args := call.get("args")) is not dict:
            return None
        for value in args.values():
            if type(value) is not str:
                return None
        calls.append((call.get("id"), call.get("name"), tuple(args.items())))
    return (reply.content, calls) if type(reply.content) is str else None


def jsonable(value: Any, depth: int = _DEPTH) -> Any:
    """A graph's input or output as JSON values; values without a JSON form become text."""
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
            return {_text(key): jsonable(item, depth - 1) for key, item in items}
        if isinstance(value, list | tuple | set | frozenset):
            return [jsonable(item, depth - 1) for item in cast("Sequence[Any]", value)]
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - user code, which must not end a run
        return object.__repr__(value)


class LoggedPrompt(NamedTuple):
    """A prompt in a `MessageLog`."""

    position: PromptPosition
    new: tuple[int, ...]
    """Numbers of the messages after the call that it continues."""
    extends: int | None
    """The call that it continues: of equal conversations the one whose reply it repeats, by the
    message's id, else `turn_links.nearest_call`."""


class _Seen(NamedTuple):
    message: BaseMessage  # kept alive, so that its id() is not given to another message
    says: Any  # a copy, since a graph may change the message in place
    number: int


def _says(message: BaseMessage) -> tuple[Any, ...]:
    """What `wire_message` reads of a message, but for ids."""
    if not isinstance(message, AIMessage):
        return message.content, message.name
    reasoning = message.additional_kwargs.get("reasoning_content")
    calls, invalid = message.tool_calls, message.invalid_tool_calls
    return message.content, message.name, calls, invalid, reasoning


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError):  # arrays
        return False


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_copied(one) for one in cast("list[Any]", value)]
    return value


class MessageLog:
    """All messages of one run, and which prompt continues which call. Not thread-safe.

    Example::

        log = MessageLog()
        first = log.add_prompt([system, user], namespace="model:1")
        log.add_reply(0, first, SampledReply.of(reply), namespace="model:1")
        second = log.add_prompt([system, user, reply, result], namespace="model:2")
        second.extends, [log.messages[number] for number in second.new]   # 0, [result]
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._seen: dict[int, _Seen] = {}
        self._numbers: dict[object, int] = {}
        self._tree = ConversationTree()
        self._namespaces: dict[int, str] = {}
        self._extra_choices: set[int] = set()
        self._by_id: dict[str, int | None] = {}
        """Calls by their reply's id; None: several replies have it, as those of a cache do."""

    def add_prompt(self, messages: Sequence[BaseMessage], namespace: str) -> LoggedPrompt:
        """Add a call's prompt and find the earlier call that it continues."""
        numbers, known = list[int](), self._seen
        for message in messages:
            seen = known.get(id(message))
            if seen is None or not _same(seen.says, _says(message)):
                numbers.append(self._number(message))
            else:
                numbers.append(seen.number)
        position = self._tree.locate(numbers)
        extends = None
        if position.known:
            extends = self._by_id.get(messages[position.known - 1].id or "")
        if extends not in position.continues:
            equal = ((call, self._namespaces[call]) for call in position.continues)
            extends = nearest_call(namespace, equal, self._extra_choices)
        return LoggedPrompt(position, tuple(numbers[position.known :]), extends)

    def add_reply(
        self,
        call: int,
        prompt: LoggedPrompt,
        sampled: SampledReply,
        namespace: str,
        *,
        extra_choice: bool = False,
    ) -> Message:
        """Add a call's reply, so that later prompts may continue it.

        A reply that was edited since is another message: prompts that repeat it do not continue the
        call. An `extra_choice` (the second or a later one of a request) is continued only if no
        other call gave the same reply.

        Returns:
            The reply as it was sampled, with the name that it has now.
        """
        wire = _signed(sampled.wire, sampled.reply.name)
        number = self._intern(wire)
        if sampled.edited() is None:
            self._see(sampled.reply, number)
        self._namespaces[call] = namespace
        if id := sampled.reply.id:
            self._by_id[id] = None if id in self._by_id else call
        if extra_choice:
            self._extra_choices.add(call)
        self._tree.add_reply(prompt.position, number, call)
        return self.messages[number]

    def _number(self, message: BaseMessage) -> int:
        """The number of a message that is new, or was changed; equal messages have one number."""
        wire = wire_message(message)
        number = self._intern(wire if isinstance(message.content, str) else _copied(wire))
        self._see(message, number)
        return number

    def _see(self, message: BaseMessage, number: int) -> None:
        says = tuple([_copied(one) for one in _says(message)])
        self._seen[id(message)] = _Seen(message, says, number)

    def _intern(self, wire: Message) -> int:
        try:
            key = _key(wire)
        except (TypeError, ValueError):
            wire = jsonable(wire)
            key = _key(wire)
        number = self._numbers.setdefault(key, len(self.messages))
        if number == len(self.messages):
            self.messages.append(wire)
        return number


def _signed(wire: Message, name: str | None) -> Message:
    """A message with a name, where `wire_message` puts it."""
    if name == wire.get("name"):
        return wire
    rest = {key: value for key, value in wire.items() if key not in ("role", "name")}
    return {"role": wire["role"], **({"name": name} if name else {}), **rest}


def _key(wire: Message) -> object:
    """A key that is equal for equal messages, whatever the order of their fields."""
    try:
        return _frozen(wire)
    except TypeError:  # numbers: 1, 1.0 and True would be equal
        return _canonical(wire)


def _frozen(value: Any) -> object:
    """JSON of texts as a value that has a hash, several times as fast as JSON is written.

    Raises:
        TypeError: it has other values than texts and None.
    """
    if type(value) is dict:
        fields = cast("dict[str, Any]", value)
        return frozenset(
            [(name, one if type(one) is str else _frozen(one)) for name, one in fields.items()]
        )
    if type(value) is list:
        return tuple([_frozen(one) for one in cast("list[Any]", value)])
    if value is None or type(value) is str:
        return value
    raise TypeError(f"got a {type(value).__name__}, expected texts.")
