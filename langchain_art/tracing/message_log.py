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
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

from langchain_core.messages import BaseMessage
from pydantic import BaseModel

from langchain_art.text_messages import completed, openai_message
from langchain_art.wire import Message
from langchain_art.wire.images import without_data
from langchain_art.wire.turn_links import ConversationTree, PromptPosition, nearest_call

_Json: TypeAlias = "dict[Any, Any] | list[Any] | str | float | None"
#: A message's fields as they were when it was seen.
_Fields: TypeAlias = "dict[str, Any]"
_canonical = json.JSONEncoder(sort_keys=True).encode
_DEPTH = 32  # of a graph's input or output; deeper values become text


def wire_message(message: BaseMessage) -> Message:
    """`openai_message`, without images' data; one that LangChain cannot convert becomes text."""
    try:
        wire = openai_message(message)
    except (ValueError, TypeError, KeyError, AttributeError):
        # content blocks of another provider
        wire = completed({"role": message.type, "content": str(message.content)}, message)
    if isinstance(wire["content"], list):  # an image's data is the server's, which has it once
        wire["content"] = without_data(wire["content"])
    return wire


@dataclass(slots=True)
class SampledReply:
    """A reply as it was when its call ended, which the graph may change in place later."""

    reply: BaseMessage
    wire: Message
    fields: _Fields

    @classmethod
    def of(cls, reply: BaseMessage) -> SampledReply:
        """Copy a reply that has not been changed yet."""
        return cls(reply, _wire_copy(reply), _fields(reply))

    def edited(self) -> Message | None:
        """The reply as it is now, if it no longer says what it said; else None.

        Its `name`, with which agents sign replies, may be another.
        """
        if _are_fields(self.fields, self.reply):
            return None  # nearly always, and sooner known
        now = wire_message(self.reply)
        nameless, said = {**now, "name": None}, {**self.wire, "name": None}
        return None if nameless == said or jsonable(nameless) == jsonable(said) else now


def _wire_copy(message: BaseMessage) -> Message:
    """Copy as `wire_message`, without values that a graph may change in place."""
    wire = wire_message(message)
    shares = message.additional_kwargs or not isinstance(message.content, str)
    return jsonable(wire) if shares else wire


def _fields(message: BaseMessage) -> _Fields:
    """A message's fields, with copies of those that a graph may change in place."""
    fields = vars(message).copy()
    for name in ("content", "additional_kwargs", "tool_calls", "invalid_tool_calls"):
        if (kind := type(value := fields.get(name, ""))) is not str:
            fields[name] = _copied(value) if value else kind()
    return fields


def _copied(value: _Json) -> Any:
    if isinstance(value, dict):
        return {key: one if type(one) is str else _copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_copied(one) for one in value]
    return _Number(value) if isinstance(value, int | float) else value


class _Number:
    """A number in `_Fields`, equal to one of its type alone: 1, 1.0 and True are not the same."""

    __slots__ = ("_value",)

    def __init__(self, value: float) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self._value) and other == self._value


def _are_fields(fields: _Fields, message: BaseMessage) -> bool:
    try:
        return fields == vars(message)
    except Exception:  # noqa: BLE001 - of values of the user's, such as arrays
        return False


def jsonable(value: Any, within: tuple[int, ...] = ()) -> Any:
    """A graph's input or output as JSON values; values without a JSON form become text.

    The members of a set are sorted. A value within itself, such as a tree's node as the parent of
    its children, is ``"…"``; `within` are the ids of those around this one.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, BaseMessage):
        return wire_message(value)
    if id(value) in within:
        return "…"
    if len(within) < _DEPTH:
        within = (*within, id(value))
        if isinstance(value, BaseModel):
            value = dict(value)
        elif is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name, None) for field in fields(value)}
        if isinstance(value, Mapping):
            return {_text(key): jsonable(item, within) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [jsonable(item, within) for item in value]
        if isinstance(value, set | frozenset):
            return sorted((jsonable(item, within) for item in value), key=_canonical)
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
        #: By `id`, which no other message gets while the message is kept here.
        self._seen: dict[int, tuple[BaseMessage, _Fields, int]] = {}
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
            try:  # as `_are_fields`, for all messages of all prompts
                same = seen is not None and seen[1] == vars(message)
            except Exception:  # noqa: BLE001
                same = False
            numbers.append(seen[2] if seen is not None and same else self._number(message))
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
        name = sampled.fields["name"] = sampled.reply.name
        wire = _signed(sampled.wire, name)
        number = self._intern(wire)
        if sampled.edited() is None:
            self._seen[id(sampled.reply)] = sampled.reply, sampled.fields, number
        self._namespaces[call] = namespace
        if reply_id := sampled.reply.id:
            self._by_id[reply_id] = None if reply_id in self._by_id else call
        if extra_choice:
            self._extra_choices.add(call)
        self._tree.add_reply(prompt.position, number, call)
        return self.messages[number]

    def _number(self, message: BaseMessage) -> int:
        """The number of a message that is new, or was changed; equal messages have one number."""
        known, number = len(self.messages), self._intern(_wire_copy(message))
        # Of an image in its own format, LangChain shows each call another copy, with all its data.
        if number == known or isinstance(message.content, str):
            self._seen[id(message)] = message, _fields(message), number
        return number

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


def _frozen(value: _Json) -> object:
    """JSON of texts as a value that has a hash, several times as fast as JSON is written.

    Raises:
        TypeError: it has other values than texts and None.
    """
    if type(value) is dict:
        return frozenset(
            [(name, one if type(one) is str else _frozen(one)) for name, one in value.items()]
        )
    if type(value) is list:
        return tuple([_frozen(one) for one in value])
    if value is None or type(value) is str:
        return value
    raise TypeError(f"got a {type(value).__name__}, expected texts.")
