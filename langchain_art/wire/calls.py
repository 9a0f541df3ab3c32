"""One model call of a run: its tags, its token counts, and the turn that the graph saw.

Token ids and logprobs are not here. The server keeps them under a completion's id (`call_id`), and
a `Turn` points to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import Field

from langchain_art.wire.identifiers import (
    Finite,
    Id,
    Message,
    RewardValue,
    ScenarioName,
    Several,
    Tag,
    Wire,
)


class Placed(Protocol):
    """Item with a place in a graph: a `Turn`, or the audit of one."""

    @property
    def node(self) -> str | None:
        """Node of the call."""
        ...

    @property
    def path(self) -> tuple[str, ...]:
        """Node with the graphs around it."""
        ...


def label(call: Placed) -> str:
    """The node of a call with the graphs around it: ``team/writer``; ``-`` outside of a graph."""
    return "/".join(call.path) or call.node or "-"


class CallTags(Wire):
    """A caller's tags of a model call: ``extra_body={"art": {...}}`` or ``x-art-*`` headers.

    Example::

        CallTags(trajectory_id="t-1", node="writer", path=("team", "writer"), step=3, attempt=1)
    """

    trajectory_id: Id | None = None
    scenario: ScenarioName | None = None
    node: str | None = Field(default=None, max_length=256)
    path: Several[str] = Field(default=(), max_length=64)
    namespace: str | None = Field(default=None, max_length=2048)
    """LangGraph's checkpoint namespace: tells parallel branches of one node apart."""
    step: int | None = None
    attempt: int = Field(default=1, ge=1)
    task_began: Finite | None = None
    """Start of the first attempt of the node, in seconds since the epoch: a node that runs again
    after an interrupt begins again."""
    thread: str | None = Field(default=None, max_length=256)
    tags: Several[Tag] = Field(default=(), max_length=32)
    """The caller's own (LangChain's ``tags``); `TrainRequest.trainable` may name them."""

    def of_turn(self) -> dict[str, Any]:
        """The fields that the call's `Turn` has, too."""
        return self.model_dump(exclude={"trajectory_id", "scenario", "task_began"})


class Usage(Wire):
    """Token counts of one call, by the sampler."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class Turn(Wire):
    """One model call of a run, as the graph saw it.

    `messages` holds only what this call added: where `extends` is ``k``, the call's full prompt is
    turn ``k``'s prompt, its reply, and then `messages`; where it is ``None``, `messages` is the
    whole prompt. So a run's size grows with its turns, not with their square.

    Example: a tool agent's two calls::

        Turn(call_id="chatcmpl-a", node="model", messages=[system, user], reply=calls_search)
        Turn(call_id="chatcmpl-b", node="model", extends=0, messages=[tool_result], reply=answer)
    """

    call_id: str | None = None
    """The completion's id, under which the server keeps the tokens; None for a foreign model that
    reported none."""
    node: str | None = None
    path: Several[str] = ()
    namespace: str | None = None
    step: int | None = None
    attempt: int = Field(default=1, ge=1)
    thread: str | None = None
    tags: Several[str] = ()
    model: str | None = None
    """The model named in the reply: ``email-agent@17``, or a foreign model's name."""
    extends: int | None = Field(default=None, ge=0)
    messages: Several[Message] = ()
    tools: Several[dict[str, Any]] = ()
    reply: Message | None = None
    """Reply as it was sampled."""
    edited: Message | None = None
    """Reply as the graph changed it in place, if it did: for review. Prompts that repeat it do not
    continue this call."""
    usage: Usage | None = None
    started_at: Finite | None = None
    """Seconds since the epoch, by the client's clock."""
    latency: Finite | None = Field(default=None, ge=0)
    """Seconds."""
    ours: bool = True
    """False for a model that the server does not serve: kept and judged, never trained."""
    excluded_because: str | None = None
    """Reason for which the graph discarded this call (``retried``, ``interrupted``, ``error``,
    ``unchosen``); it is kept for review and never trained."""
    error: str | None = None
    reward: RewardValue | None = None
    """Reward of this call, in addition to the trajectory's (`TrainConfig.credit`); None: none."""

    @property
    def names(self) -> frozenset[str]:
        """Names that `TrainRequest.trainable` may use: node, path, tags, model, policy."""
        model = self.model or ""
        named = (self.node or "", *self.path, *self.tags, model, model.partition("@")[0])
        return frozenset(name for name in named if name)

    def learns(self, trainable: Mapping[str, bool]) -> bool:
        """True if `trainable` chooses this turn.

        A turn with a name that is False never learns. Of the others, all learn if no name is True,
        else those that have such a name.

        Example::

            Turn(node="critic").learns({"writer": True})     # False
            Turn(node="writer").learns({"critic": False})    # True
        """
        if any(not trainable.get(name, True) for name in self.names):
            return False
        return not any(trainable.values()) or any(trainable.get(name, False) for name in self.names)
