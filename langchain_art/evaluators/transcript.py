"""A run as a judge reads it: a list of blocks in chronological order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_art.wire import Message, Trajectory

_ROLES = ("system", "developer", "user", "assistant")
_ERROR_LENGTH = 300
compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode


@dataclass(frozen=True)
class Block:
    """One message, tool call or event."""

    kind: str  # "user", "assistant", "call" …: never text of the run
    text: str = ""  # of the run, so not trusted
    is_output: bool = False  # of a tool, which is truncated first


def transcript(run: Trajectory, *, labelled: bool) -> tuple[Block, ...]:
    """A run's calls as blocks: each message once, then how the run ended.

    A call that continues the call before it shows only its new messages. Any other call shows its
    whole prompt, with one block ``again`` and their number for messages that were shown before.
    Excluded turns are mentioned without their text. Reasoning is not shown: the judge scores
    actions and results. A reply that the graph changed in place (`Turn.edited`) is shown as it was
    sampled, also where a later prompt or the output repeats the change. `labelled` adds a block
    with the call's node whenever it changes.
    """
    blocks: list[Block] = []
    shown: set[tuple[Block, ...]] = set()
    sampled = {
        _blocks(turn.edited, {}): _blocks(turn.reply, {})
        for turn in run.turns
        if turn.edited is not None and turn.reply is not None
    }
    last, place = None, None
    for index, turn in enumerate(run.turns):
        if labelled and (now := turn.label) != place:
            blocks.append(Block("node", now))
            place = now
        if turn.excluded_because is not None:
            blocks.append(Block("excluded", turn.excluded_because))
            continue
        whole = turn.extends is None or turn.extends != last
        messages = run.prompt(index) if whole else turn.messages
        _add(blocks, shown, messages, sampled, collapse=whole)
        if turn.reply is not None:
            _add(blocks, shown, [turn.reply], {}, collapse=False)
        if turn.error is not None:
            blocks.append(Block("error", turn.error[:_ERROR_LENGTH]))
        last = index
    edits = {block.text for edited in sampled for block in edited}
    return (*blocks, *_ending(run, edits.union(block.text for block in blocks)))


def transcripts(runs: Sequence[Trajectory], *, labelled: bool) -> list[tuple[Block, ...]]:
    """The runs' transcripts; equal ones of runs whose states differ end with the whole state."""
    told = [transcript(run, labelled=labelled) for run in runs]
    states = [compact(_state(run.output)) for run in runs]
    kinds = Counter(blocks for blocks, _ in set(zip(told, states, strict=True)))
    return [
        (*blocks, Block("state", state)) if kinds[blocks] > 1 else blocks
        for blocks, state in zip(told, states, strict=True)
    ]


def tool_line(tool: Mapping[str, Any]) -> str:
    """A tool as a signature and its description.

    Example: ``search(query: string, limit?: integer): Search the inbox.``
    """
    function = tool.get("function") or tool
    schema = function.get("parameters") or {}
    required = schema.get("required") or ()
    fields = [
        f"{name}{'' if name in required else '?'}: {_type(field)}"
        for name, field in (schema.get("properties") or {}).items()
    ]
    described = function.get("description")
    signature = f"{function.get('name', 'tool')}({', '.join(fields)})"
    return f"{signature}: {described}" if described else signature


def _type(field: Any) -> str:
    given = field if isinstance(field, Mapping) else {}
    if "enum" in given:
        return "|".join(map(str, given["enum"]))
    kind = given.get("type")
    return kind if isinstance(kind, str) else "any"


def _add(
    blocks: list[Block],
    shown: set[tuple[Block, ...]],
    messages: Sequence[Message],
    sampled: Mapping[tuple[Block, ...], tuple[Block, ...]],
    *,
    collapse: bool,
) -> None:
    again = 0
    ordinals: dict[str, int] = {}
    for message in messages:
        if len(calls := message.get("tool_calls") or ()) > 1:  # their results have their numbers
            ordinals = {str(call.get("id")): n for n, call in enumerate(calls, 1)}
        new = _blocks(message, ordinals)
        new = sampled.get(new, new)
        if collapse and new in shown:
            again += 1
            continue
        if again:
            blocks.append(Block("again", str(again)))
            again = 0
        shown.add(new)
        blocks.extend(new)
    if again:
        blocks.append(Block("again", str(again)))


def _blocks(message: Message, ordinals: Mapping[str, int]) -> tuple[Block, ...]:
    role, text = message.get("role"), text_of(message.get("content"))
    if role in ("tool", "function"):
        number = ordinals.get(str(message.get("tool_call_id")))
        return (Block(f"result {number}" if number else "result", text, is_output=True),)
    calls = tuple(
        Block("call", f"{name} {given if isinstance(given, str) else compact(given)}")
        for name, given in tool_calls(message)
    )
    spoken = Block(role if role in _ROLES else "message", text)
    return (spoken, *calls) if text or not calls else calls


def tool_calls(message: Message | None) -> list[tuple[str, Any]]:
    """Name and arguments of each tool call of a reply."""
    functions = [call.get("function") or {} for call in (message or {}).get("tool_calls") or []]
    return [(str(function.get("name")), function.get("arguments")) for function in functions]


def text_of(content: Any) -> str:
    """A message's content as text; parts that are not text are named: ``[image_url]``."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return compact(content)
    parts: list[str] = []
    for part in content:
        if isinstance(part, Mapping):
            text = part.get("text")
            parts.append(text if isinstance(text, str) else f"[{part.get('type', 'part')}]")
        else:
            parts.append(str(part))
    return "\n".join(parts)


def _ending(run: Trajectory, known: set[str]) -> list[Block]:
    """End of the run, and the graph's output, unless it is one of the known texts."""
    ending: list[Block] = []
    if not run.turns and run.input is not None:
        ending.append(Block("input", as_text(run.input)))
    ending += [Block("output", text) for text in _outcomes(run) if text and text not in known]
    if run.status != "completed":
        ending.append(Block("ended", f"{run.status} {(run.error or '')[:_ERROR_LENGTH]}".strip()))
    return ending


def _outcomes(run: Trajectory) -> list[str]:
    """The last message of a state with messages, and the other keys that the run changed."""
    output = run.output
    if output is None:
        return []
    if not isinstance(output, Mapping):
        return [as_text(output)]
    before = run.input if isinstance(run.input, Mapping) else {}
    messages = output.get("messages")
    last: str | None = None
    if isinstance(messages, list) and messages and isinstance(messages[-1], Mapping):
        last = text_of(messages[-1].get("content"))
    rest = {
        key: value
        for key, value in output.items()
        if before.get(key) != value and not (key == "messages" and last is not None)
    }
    return [last or "", as_text(rest) if rest else ""]


def _state(output: Any) -> Any:
    """The output without reasoning; ids of tool calls, which are drawn, as ordinals."""
    if not isinstance(output, Mapping):
        return output
    messages = output.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
        return output
    ordinals: dict[Any, int] = {}

    def told(message: Mapping[str, Any]) -> dict[str, Any]:
        left = {key: value for key, value in message.items() if key != "reasoning_content"}
        if calls := left.get("tool_calls"):
            numbers = [ordinals.setdefault(call.get("id"), len(ordinals)) for call in calls]
            left["tool_calls"] = [{**c, "id": n} for c, n in zip(calls, numbers, strict=True)]
        if (id_ := left.get("tool_call_id")) in ordinals:
            left["tool_call_id"] = ordinals[id_]
        return left

    return {**output, "messages": [told(one) for one in messages]}


def as_text(value: Any) -> str:
    """The text, or another value as JSON."""
    return value if isinstance(value, str) else compact(value)
