"""Calls that some client tagged with a trajectory's id, put together into a `Trajectory`.

The client may be any: an SDK, a graph in another language, curl. What it did with the replies is
read from its calls alone: a call goes on with an earlier one if its prompt begins with that one's
prompt and reply, token by token.

Three kinds of call are kept for review but do not count (`Turn.excluded_because`):

- ``unchosen``: of several choices (``n``) of one completion those count that a later call goes on
  with, and the first if none does;
- ``retried``: an earlier attempt of a task (`CallTags.attempt`); and a completion whose reply never
  reached its client, which the OpenAI SDKs tell us by sending the same request again with
  ``x-stainless-retry-count``. Equal requests without that header are what they seem: several
  samples of one prompt.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pydantic_core import to_json

from langchain_art.errors import InvalidRequest
from langchain_art.wire import Message, Trajectory, Turn, Usage
from langchain_art_server.algorithms.sequences.prefix_tree import PrefixTree
from langchain_art_server.storage.tables import CallRecord

#: Most turns of a trajectory (`Trajectory.turns`).
MAX_TURNS = 4096


def assemble(trajectory_id: str, calls: Iterable[CallRecord]) -> Trajectory:
    """A trajectory without a reward, its turns in the order in which they were asked for.

    Args:
        trajectory_id: the tag.
        calls: all that bear it, in any order.

    Raises:
        InvalidRequest: more calls than a trajectory may have turns.
    """
    ordered = _in_order(calls)
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
        extends = _nearest(call, [(i, ordered[i]) for i in links[index]], excluded)
        known = 0 if extends is None else len(ordered[extends].request["messages"]) + 1
        turns.append(_turn(call, extends, known, excluded.get(index)))
    scenario = next((c.tags.scenario for c in ordered if c.tags.scenario), None)
    return Trajectory(id=trajectory_id, scenario=scenario, turns=tuple(turns))


def _turn(call: CallRecord, extends: int | None, known: int, excluded_because: str | None) -> Turn:
    """The turn of a call; its first `known` messages are turn `extends`'s, reply included."""
    tags = call.tags
    return Turn(
        call_id=call.id,
        node=tags.node,
        path=tags.path,
        namespace=tags.namespace,
        step=tags.step,
        attempt=tags.attempt,
        thread=tags.thread,
        tags=tags.tags,
        model=call.model,
        extends=extends,
        messages=tuple(call.request["messages"][known:]),
        tools=tuple(call.request.get("tools") or ()),
        reply=call.reply,
        usage=Usage(
            prompt_tokens=len(call.prompt_token_ids), completion_tokens=len(call.token_ids)
        ),
        started_at=_start(call),
        latency=call.latency,
        excluded_because=excluded_because,
    )


def _start(call: CallRecord) -> float:
    return call.created_at - call.latency


def _completion(call: CallRecord) -> tuple[str, int]:
    """The id of a call's completion, and which choice of it the call is: ``chatcmpl-x:2``."""
    name, _, choice = call.id.partition(":")
    return name, int(choice or 0)


def _in_order(calls: Iterable[CallRecord]) -> list[CallRecord]:
    """By start; choices of one completion together, in their order."""
    known = list(calls)
    starts: dict[str, float] = {}
    for call in known:
        name, _ = _completion(call)
        starts[name] = min(_start(call), starts.get(name, _start(call)))
    return sorted(known, key=lambda c: (starts[_completion(c)[0]], *_completion(c)))


# --- which call goes on with which ----------------------------------------------------------------


def _link(calls: Sequence[CallRecord]) -> list[tuple[int, ...]]:
    """Of each call, the earlier ones that it may go on with, all equal to each other.

    Token ids decide; where none fit, messages do (a client that rewrote what it sends back).
    """
    tokens, texts = PrefixTree(), _MessageTree()
    links: list[tuple[int, ...]] = []
    for index, call in enumerate(calls):
        within = tokens.meet(call.prompt_token_ids).within
        links.append(
            tuple(i for i in within if _repeats_reply(call, calls[i])) or texts.meet(calls, index)
        )
        tokens.add(index, [*call.prompt_token_ids, *call.token_ids])
    return links


def _repeats_reply(call: CallRecord, earlier: CallRecord) -> bool:
    """Whether a reply stands in the call's messages where the earlier call's would."""
    messages, position = call.request["messages"], len(earlier.request["messages"])
    return position < len(messages) and messages[position].get("role") == "assistant"


@dataclass
class _MessageTree:
    """Conversations, message by message; filled only when it is asked."""

    _steps: dict[tuple[int, bytes], int] = field(default_factory=dict[tuple[int, bytes], int])
    _ends: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _filled: int = 0

    def meet(self, calls: Sequence[CallRecord], index: int) -> tuple[int, ...]:
        """The longest of the conversations before call `index` that its prompt begins with."""
        for earlier in range(self._filled, index):
            node = 0
            for message in [*calls[earlier].request["messages"], calls[earlier].reply]:
                node = self._steps.setdefault((node, _canonical(message)), len(self._steps) + 1)
            self._ends[node].append(earlier)
        self._filled = index
        node, longest = 0, list[int]()
        for message in calls[index].request["messages"]:
            step = self._steps.get((node, _canonical(message)))
            if step is None:
                break
            node, longest = step, self._ends.get(step, longest)
        return tuple(longest)


def _canonical(message: Message) -> bytes:
    """A message as bytes that are equal for whatever means the same to the model.

    Clients send a reply back with ``content`` null, empty or left out, as text or as parts, with
    empty fields that they know of, and with arguments that they have parsed and written again.
    """
    plain = {key: value for key, value in message.items() if value not in (None, "", [], {})}
    if message.get("role") == "assistant":
        plain.pop("name", None)  # agents sign what they send back
    content = plain.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        plain["content"] = "".join(part.get("text") or "" for part in content)
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_canonical_call(call) for call in plain["tool_calls"]]
    return json.dumps(plain, sort_keys=True).encode()


def _canonical_call(call: Any) -> Any:
    function: dict[str, Any] = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


def _nearest(
    call: CallRecord, earlier: Sequence[tuple[int, CallRecord]], excluded: dict[int, str]
) -> int | None:
    """Of equals: what counts, then the same task, then the same enclosing one, then the latest."""

    def rank(item: tuple[int, CallRecord]) -> tuple[bool, bool, bool, int]:
        index, other = item
        mine, theirs = call.tags.namespace or "", other.tags.namespace or ""
        around = mine.rpartition("|")[0] == theirs.rpartition("|")[0]
        return index not in excluded, mine == theirs, around, index

    return max(earlier, key=rank)[0] if earlier else None


# --- which calls do not count ---------------------------------------------------------------------


def _exclusions(calls: Sequence[CallRecord], links: Sequence[Sequence[int]]) -> dict[int, str]:
    """Index of a call that does not count -> why."""
    goes_on: defaultdict[int, set[int]] = defaultdict(set)
    for later, link in enumerate(links):
        for earlier in link:
            goes_on[earlier].add(later)
    excluded: dict[int, str] = {}
    completions: list[_Completion] = []
    for _, choices in groupby(range(len(calls)), key=lambda i: _completion(calls[i])[0]):
        completion = _Completion(calls, tuple(choices), goes_on)
        completions.append(completion)
        excluded |= dict.fromkeys(completion.unchosen(), "unchosen")
    for index in [*_earlier_attempts(calls), *_undelivered(completions)]:
        excluded[index] = "retried"
    return excluded


def _earlier_attempts(calls: Sequence[CallRecord]) -> list[int]:
    """Of one task only the last attempt counts.

    A namespace names a task, or a node and its step. Where a caller says neither, its attempts
    cannot be told from the same node's calls in other steps, and all count.
    """
    tasks: defaultdict[Any, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        tags = call.tags
        if tags.namespace:
            tasks[tags.thread, tags.namespace].append(index)
        elif tags.step is not None:
            tasks[tags.thread, tags.path, tags.node, tags.step].append(index)
    earlier: list[int] = []
    for task in tasks.values():
        last = max(calls[index].tags.attempt for index in task)
        earlier += [index for index in task if calls[index].tags.attempt < last]
    return earlier


class _Completion:
    """One request that was answered, with its choices."""

    def __init__(
        self, calls: Sequence[CallRecord], choices: tuple[int, ...], goes_on: dict[int, set[int]]
    ) -> None:
        self.choices = choices
        first = calls[choices[0]]
        self.retry = first.retry
        self.start = _start(first)
        self.end = max(calls[i].created_at for i in choices)
        self._first = first
        self.later = set[int]().union(*(goes_on.get(i, set()) for i in choices))
        """The calls that go on with one of its choices."""
        self._used = [i for i in choices if goes_on.get(i)]
        self._texts = [tuple(calls[i].token_ids) for i in choices]

    def request(self) -> bytes:
        """What was asked, and from where: equal for two tries of one request."""
        return to_json([self._first.policy, self._first.tags, self._first.request])

    def unchosen(self) -> list[int]:
        """The choices that do not count. Of equal ones that are gone on with, the first does."""
        kept: dict[tuple[int, ...], int] = {}
        for choice, text in zip(self.choices, self._texts, strict=True):
            if choice in self._used:
                kept.setdefault(text, choice)
        counting = set(kept.values()) or {self.choices[0]}
        return [choice for choice in self.choices if choice not in counting]


def _undelivered(completions: Sequence[_Completion]) -> list[int]:
    """The choices of completions whose client asked again, since no reply had reached it.

    A retry stands for one earlier try of the same request. That try's reply did not arrive, so no
    call goes on with it; of several such tries it is the one that ended last. A try that failed
    before it was sampled left nothing behind, and nothing is excluded for it, unless an equal
    request was made beside it: the two cannot be told apart.
    """
    if not any(completion.retry for completion in completions):
        return []
    equal: defaultdict[bytes, list[_Completion]] = defaultdict(list)
    for completion in completions:
        equal[completion.request()].append(completion)
    lost: list[_Completion] = []
    for tries in equal.values():
        for retry in tries:
            candidates = [
                one
                for one in tries
                if one.start < retry.start
                and one.retry < retry.retry
                and one not in lost
                and one.later <= retry.later
            ]
            if candidates:
                lost.append(max(candidates, key=lambda one: (one.retry, one.end)))
    return [choice for completion in lost for choice in completion.choices]
