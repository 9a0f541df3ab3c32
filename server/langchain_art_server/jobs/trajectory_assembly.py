"""Assembles a `Trajectory` from the records of the calls that were tagged with its id.

For clients without a capture: an SDK, a graph in another language, curl. Only the calls themselves
show what the client did with the replies: a call continues an earlier one if its prompt begins with
that call's prompt and reply, token by token.

Calls that do not count are kept for review, with `Turn.excluded_because`:

- ``unchosen``: of several choices (``n``) of one completion, those that no later call continues;
  all but the first, if no choice is continued. And of calls of one LangGraph task that ask the same
  (a chain's retries, asking until a reply is good enough) those that no later call continues, but
  for the last: which one the node used is not known here;
- ``interrupted``: calls of a LangGraph task that began again (`CallTags.task_began`);
- ``retried``: an earlier attempt of a task (`CallTags.attempt`); and a completion whose reply never
  reached its client. The OpenAI SDKs then send the same request again, with the header
  ``x-stainless-retry-count``. Equal requests without that header are several samples of one prompt.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic_core import to_json

from langchain_art.errors import InvalidRequest
from langchain_art.wire import CallTags, Message, Trajectory, Turn, Usage
from langchain_art.wire.turn_links import (
    DRAWING,
    ConversationTree,
    nearest_call,
    superseded_attempts,
    unused_choices,
)
from langchain_art_server.algorithms.sequences.prefix_tree import PrefixTree
from langchain_art_server.storage.tables import CallRecord

#: Most turns of a trajectory (`Trajectory.turns`).
MAX_TURNS = 4096


def assemble(trajectory_id: str, calls: Iterable[CallRecord]) -> Trajectory:
    """A trajectory of all calls with one tag, its turns in the order in which they started.

    Raises InvalidRequest: more calls than a trajectory may have turns.
    """
    # Choices of one completion stand together, in their order.
    ordered = sorted(calls, key=lambda call: (call.began, *_completion(call)))
    if len(ordered) > MAX_TURNS:
        raise InvalidRequest(
            f"got {len(ordered)} calls tagged with trajectory {trajectory_id!r}, expected at most "
            f"{MAX_TURNS}; give each run an id of its own",
            param="trajectory_id",
        )
    links = _link(ordered)
    excluded = _exclusions(ordered, links)
    turns: list[Turn] = []
    for index, call in enumerate(ordered):
        counting = [i for i in links[index] if i not in excluded] or links[index]
        equal = [(i, ordered[i].tags.namespace or "") for i in counting]
        extends = nearest_call(call.tags.namespace or "", equal)
        known = 0 if extends is None else len(ordered[extends].request["messages"]) + 1
        turns.append(_turn(call, extends, known, excluded.get(index)))
    scenario = next((c.tags.scenario for c in ordered if c.tags.scenario), None)
    return Trajectory(id=trajectory_id, scenario=scenario, turns=tuple(turns))


def _turn(call: CallRecord, extends: int | None, known: int, excluded_because: str | None) -> Turn:
    """The turn of a call whose first `known` messages are the prompt and reply of `extends`."""
    return Turn(
        **call.tags.of_turn(),
        call_id=call.id,
        model=call.model,
        extends=extends,
        messages=tuple(call.request["messages"][known:]),
        tools=tuple(call.shown_tools),
        reply=call.reply,
        usage=Usage(
            prompt_tokens=len(call.prompt_token_ids), completion_tokens=len(call.token_ids)
        ),
        started_at=call.created_at - call.latency,
        latency=call.latency,
        excluded_because=excluded_because,
    )


def _completion(call: CallRecord) -> tuple[str, int]:
    """The id of a call's completion, and which choice of it the call is: ``chatcmpl-x:2``."""
    name, _, choice = call.id.partition(":")
    return name, int(choice or 0)


def _link(calls: Sequence[CallRecord]) -> list[tuple[int, ...]]:
    """Earlier calls that each call may continue, all with the same prompt and reply.

    Token ids decide; if none match, messages do (for a client that rewrote what it sends back).
    """
    tokens, messages = PrefixTree(), ConversationTree()
    filled = 0  # how many calls are in `messages`, which few calls need
    links: list[tuple[int, ...]] = []
    for index, call in enumerate(calls):
        within = tokens.meet(call.prompt_token_ids).within
        link = tuple(i for i in within if _repeats_reply(call, calls[i]))
        if not link:
            for at, earlier in enumerate(calls[filled:index], filled):
                position = messages.locate(map(_canonical, earlier.request["messages"]))
                messages.add_reply(position, _canonical(earlier.reply), at)
            filled = index
            link = messages.locate(map(_canonical, call.request["messages"])).continues
        links.append(link)
        tokens.add(index, [*call.prompt_token_ids, *call.token_ids])
    return links


def _repeats_reply(call: CallRecord, earlier: CallRecord) -> bool:
    """True if the call's messages hold a reply at the position of the earlier call's reply."""
    messages, position = call.request["messages"], len(earlier.request["messages"])
    return position < len(messages) and messages[position].get("role") == "assistant"


def _canonical(message: Message) -> bytes:
    """A message as bytes, equal for messages that mean the same to the model.

    Clients send a reply back with ``content`` null, empty or absent, as text or as parts, with
    additional empty fields, and with arguments that they have parsed and serialised again.
    """
    plain = {key: value for key, value in message.items() if value not in (None, "", [], {})}
    if message.get("role") == "assistant":
        plain.pop("name", None)  # agents add their name to the replies that they send back
    content = plain.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        plain["content"] = "".join(str(part.get("text") or "") for part in content)
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_canonical_call(call) for call in plain["tool_calls"]]
    return json.dumps(plain, sort_keys=True).encode()


def _canonical_call(call: Any) -> Any:
    function: dict[str, Any] = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


def _exclusions(calls: Sequence[CallRecord], links: Sequence[Sequence[int]]) -> dict[int, str]:
    """Index of a call that does not count -> why."""
    continued_by: defaultdict[int, set[int]] = defaultdict(set)
    for later, link in enumerate(links):
        for earlier in link:
            continued_by[earlier].add(later)
    excluded: dict[int, str] = {}
    completions: list[_AnsweredRequest] = []
    for _, same in groupby(range(len(calls)), key=lambda i: _completion(calls[i])[0]):
        choices = tuple(same)
        kept: dict[tuple[int, ...], int] = {}  # of equal choices that are continued, the first
        for choice in choices:
            if choice in continued_by:
                kept.setdefault(tuple(calls[choice].token_ids), choice)
        excluded |= dict.fromkeys(unused_choices(choices, set(kept.values())), "unchosen")
        end = max(calls[i].number for i in choices)
        later = set[int]().union(*(continued_by.get(i, ()) for i in choices))
        completions.append(_AnsweredRequest(choices, calls[choices[0]], end, later))
    tasks = [_task(call.tags) for call in calls]
    again = superseded_attempts(
        (task if call.tags.task_began else None, call.tags.task_began or 0.0)
        for task, call in zip(tasks, calls, strict=True)
    )
    superseded = superseded_attempts(
        (None if index in again else task, calls[index].tags.attempt)
        for index, task in enumerate(tasks)
    )
    for index in [*superseded, *_undelivered(completions)]:
        excluded[index] = "retried"
    excluded |= dict.fromkeys(again, "interrupted")
    for asked in _asked_again(completions, excluded):
        excluded |= dict.fromkeys(asked.choices, "unchosen")
    return excluded


def _asked_again(
    completions: Iterable[_AnsweredRequest], excluded: Container[int]
) -> Iterable[_AnsweredRequest]:
    """Completions that no call continues, of a task of a graph that asked the same again."""
    latest: dict[Hashable, _AnsweredRequest] = {}
    for completion in completions:
        first = completion.first
        if not first.tags.namespace or all(i in excluded for i in completion.choices):
            continue
        asked = {name: v for name, v in first.request.items() if name not in DRAWING}
        key = (_task(first.tags), first.model, to_json(asked))
        before, latest[key] = latest.get(key), completion
        if before is not None and not before.later:
            yield before


def _task(tags: CallTags) -> Hashable:
    """Key that the attempts of one task share: a namespace, or a node and its step.

    None where the caller gives neither: attempts then look like other steps' calls.
    """
    if tags.namespace:
        return tags.thread, tags.namespace
    return None if tags.step is None else (tags.thread, tags.path, tags.node, tags.step)


@dataclass(eq=False)
class _AnsweredRequest:
    """One completion with its choices."""

    choices: tuple[int, ...]
    first: CallRecord
    end: int
    later: set[int]
    """The calls that continue one of its choices."""


def _undelivered(completions: Sequence[_AnsweredRequest]) -> list[int]:
    """The choices of completions whose reply did not arrive, so that their client asked again.

    Each retry excludes one earlier try of the same request that no call continues; of several such
    tries the one that ended last. A try that failed before it was sampled has no record, and then
    nothing is excluded, unless an equal request ran in parallel: the two cannot be distinguished.
    The last retries are looked at first: what continues them may seem to continue any earlier try
    whose reply is equal, and no try between these two has to be continued for that.
    """
    if not any(completion.first.retry for completion in completions):
        return []
    equal: defaultdict[bytes, list[_AnsweredRequest]] = defaultdict(list)
    for completion in completions:
        first = completion.first
        equal[to_json([first.policy, first.tags, first.request])].append(completion)
    lost: list[_AnsweredRequest] = []
    for tries in equal.values():
        continues = {one: one.later for one in tries}
        for retry in sorted(tries, key=lambda one: one.first.retry, reverse=True):
            candidates = [
                one
                for one in tries
                if one.first.began < retry.first.began
                and one.first.retry < retry.first.retry
                and one not in lost
                and one.later <= continues[retry]
            ]
            if candidates:
                lost.append(max(candidates, key=lambda one: (one.first.retry, one.end)))
                continues[lost[-1]] = continues[retry]
    return [choice for completion in lost for choice in completion.choices]
