"""Converts outputs of other libraries (messages, states of graphs, texts) into groups of runs.

Messages become turns, so that evaluators see steps, tools and names. Such runs have no sampled
tokens and cannot be trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages

from langchain_art.errors import ConfigError
from langchain_art.tracing.message_log import jsonable, wire_message
from langchain_art.wire import Message, Trajectory, TrajectoryGroup, Turn


def as_group(
    runs: Sequence[Any] | TrajectoryGroup,
    *,
    inputs: Any = None,
    reference: Any = None,
    run_ids: Sequence[str] | None = None,
) -> TrajectoryGroup:
    """A group of runs from the outputs of another tool.

    Example::

        as_group(["14 March", "15 March"], inputs="When is the audit?", reference="14 March")

    Args:
        runs: an output for each run (see `as_trajectory`); or a group, which is returned unchanged.
        inputs: the input of all runs; it becomes ``metadata["scenario"]["input"]``.
        reference: the expected answer: a mapping is merged into ``metadata["scenario"]``, any other
            value becomes its ``answer``.
        run_ids: of the runs, in order. None: ``run-1``, ``run-2`` …

    Raises:
        ConfigError: there is no run, or LangChain cannot read the messages.
    """
    if isinstance(runs, TrajectoryGroup):
        return runs
    if isinstance(runs, str | bytes | Mapping):
        raise ConfigError(f"got {runs!r:.100}, expected a list with an output for each run")
    if not runs:
        raise ConfigError("got no outputs, expected at least one run to score")
    names = run_ids or [f"run-{number}" for number in range(1, len(runs) + 1)]
    right = reference if isinstance(reference, Mapping) else {"answer": reference}
    given = {**right, "input": inputs}
    scenario = {key: jsonable(value) for key, value in given.items() if value is not None}
    return TrajectoryGroup(
        id="group",
        trajectories=tuple(as_trajectory(run, n) for run, n in zip(runs, names, strict=True)),
        metadata={"scenario": scenario} if scenario else {},
    )


def candidates(outputs: Any) -> Sequence[Any] | TrajectoryGroup:
    """The runs in `outputs`, for `as_group`: one run if `is_single`, else one run per item."""
    if isinstance(outputs, TrajectoryGroup):
        return outputs
    return [outputs] if is_single(outputs) else list(outputs)


def is_single(outputs: Any) -> bool:
    """True if it is one run: a list of messages only, or anything that is no list or group."""
    if isinstance(outputs, list | tuple):
        return bool(outputs) and all(map(_is_message, outputs))
    return not isinstance(outputs, TrajectoryGroup)


def as_trajectory(output: Any, id: str) -> Trajectory:
    """One run: a `Trajectory`, the trajectory of a `Run`, or another output converted.

    ==============================================  ===============================================
    output                                          run
    ==============================================  ===============================================
    a message or several (LangChain's,              a turn for each assistant's message, named by
    ``{"role": …}``, ``("user", text)``), or a      its ``name``; the mapping's other fields are
    mapping with ``messages``                       part of the output
    None                                            no turn
    a text                                          one turn with the text as reply
    anything else                                   one turn with its JSON as reply
    ==============================================  ===============================================
    """
    if isinstance(output, Trajectory):
        return output
    if callable(snapshot := getattr(output, "trajectory", None)):
        return cast(Trajectory, snapshot())
    if output is None:
        return Trajectory(id=id)
    messages = _messages(output)
    if messages is None:
        plain = jsonable(output)
        text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
        turns = [Turn(reply={"role": "assistant", "content": text}, ours=False)]
    else:
        fields = output if isinstance(output, Mapping) and not _is_message(output) else {}
        plain = {**jsonable(fields), "messages": [wire_message(message) for message in messages]}
        turns = _turns(messages)
    return Trajectory(id=id, turns=tuple(turns), output=plain)


def _messages(output: Any) -> list[BaseMessage] | None:
    found: Any = [output] if isinstance(output, BaseMessage | Mapping) else output
    if isinstance(output, Mapping) and not _is_message(output):
        found = output.get("messages")
    if not (isinstance(found, list | tuple) and found and all(map(_is_message, found))):
        return None
    try:
        return convert_to_messages(list(found))
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:
        raise ConfigError(
            f"got messages that LangChain cannot read ({error}): {str(found)[:200]}. Expected "
            "LangChain's messages, or mappings with role and content as OpenAI writes them."
        ) from error


def _is_message(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "role" in value and ("content" in value or "tool_calls" in value)
    if isinstance(value, tuple):
        return len(value) == 2 and value[0] in ("user", "human", "ai", "assistant", "system")
    return isinstance(value, BaseMessage)


def _turns(messages: Sequence[BaseMessage]) -> list[Turn]:
    turns: list[Turn] = []
    new: list[Message] = []
    for message in messages:
        wire = wire_message(message)
        if not isinstance(message, AIMessage):
            new.append(wire)
            continue
        last = len(turns) - 1 if turns else None
        turns.append(
            Turn(node=message.name, extends=last, messages=tuple(new), reply=wire, ours=False)
        )
        new = []
    return turns or [Turn(messages=tuple(new), ours=False)]
