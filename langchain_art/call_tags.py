"""Where a model call stands in its graph, said as `wire.CallTags` fields.

The one thing that the chat model and the capture handler share. A handler hears a call start in
the very context in which its request is then built, on all four paths (invoke, ainvoke, stream,
astream), so it leaves the call's tags in a context variable and the model picks them up.

Where nothing captures, a model's own `Tagger` does that. So a graph that runs elsewhere (on
LangGraph's server, in a job of its own) needs no capture: whoever starts it says in the config's
metadata which trajectory its calls belong to, and the server puts the trajectory together when it
is scored::

    remote = RemoteGraph("agent", url="http://agents:2024")
    metadata = {"art_trajectory_id": "run-17", "art_scenario": "q-7"}
    remote.invoke(state, {"metadata": metadata})
    trajectory = ArtClient().reward("run-17", 1.0)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.runtime import get_runtime

# The limits of `wire.CallTags`: a tag that is too long is cut, since a label must not cost a call.
_NAME_LENGTH = 256
_NAMESPACE_LENGTH = 2048
_PATH_DEPTH = 64
_TAGS = 32
# What LangChain and LangGraph write among the user's tags for their own book-keeping.
_NOT_THE_USERS = re.compile(r"(seq:step|map:key|graph:step|retry:attempt|langsmith):|nostream$")


@dataclass(slots=True)
class Heard:
    """A model call that a handler heard start and that has not ended yet."""

    run_id: UUID
    serial: int
    """Of the handler: where several hear one call, the newest one's tags are sent."""
    tags: dict[str, Any]
    open: bool = True
    """False once the call has ended: its tags are nobody else's. The variable itself cannot be
    reset then, because LangChain ends asynchronous calls in a copy of the context."""


_HEARD: ContextVar[Heard | None] = ContextVar("langchain_art_heard", default=None)


def announce(heard: Heard) -> None:
    """Offers a call's tags to the model that is about to send it, in this context."""
    known = _HEARD.get()
    if known is None or known.run_id != heard.run_id or known.serial < heard.serial:
        _HEARD.set(heard)


def current_tags() -> dict[str, Any]:
    """The tags of the call that this context is about to make; empty outside of any graph or run.

    Only fields that are known and differ from their default are there, in JSON's types.
    """
    heard = _HEARD.get()
    return dict(heard.tags) if heard is not None and heard.open else {}


class Tagger(BaseCallbackHandler):
    """A model's own handler: tags its calls by their metadata where no capture hears them."""

    run_inline = True

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Leaves the call's tags for the model."""
        metadata = metadata or {}
        sent = place(metadata, node_attempt(), tags or ())
        for name in ("trajectory_id", "scenario"):
            if (value := metadata.get(f"art_{name}")) is not None:
                sent[name] = str(value)
        announce(Heard(run_id, -1, sent))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """The tags have been sent."""
        self._close(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """The tags have been sent, or never will be."""
        self._close(run_id)

    def _close(self, run_id: UUID) -> None:
        heard = _HEARD.get()
        if heard is not None and heard.run_id == run_id:
            heard.open = False


TAGGER = Tagger()


def place(
    metadata: Mapping[str, Any], attempt: int = 1, tags: Sequence[str] = ()
) -> dict[str, Any]:
    """What LangGraph's metadata of a run, and the user's tags on it, say about its place.

    Example::

        place({"langgraph_node": "inner", "langgraph_checkpoint_ns": "team:8f…|inner:03…"})
        # {"node": "inner", "namespace": "team:8f…|inner:03…", "path": ["team", "inner"]}

    A call that a middleware makes for itself (summaries, tool selection) ends its path with the
    name of its source. A node is tagged by its metadata, since LangGraph's nodes have no tags:
    ``add_node("writer", …, metadata={"art_tags": ["main"]})``.
    """
    marks = metadata.get("art_tags") or ()
    marks = [*tags, *([marks] if isinstance(marks, str) else marks)]
    where: dict[str, Any] = {}
    if node := metadata.get("langgraph_node"):
        where["node"] = str(node)[:_NAME_LENGTH]
    namespace = str(metadata.get("langgraph_checkpoint_ns") or "")
    path = path_of(namespace)
    if source := metadata.get("lc_source"):
        path.append(str(source))
    if namespace:
        where["namespace"] = namespace[:_NAMESPACE_LENGTH]
    if path:
        where["path"] = path[:_PATH_DEPTH]
    if isinstance(step := metadata.get("langgraph_step"), int):
        where["step"] = step
    if (thread := metadata.get("thread_id")) is not None:
        where["thread"] = str(thread)[:_NAME_LENGTH]
    if attempt > 1:
        where["attempt"] = attempt
    own = [str(tag)[:_NAME_LENGTH] for tag in marks if tag and not _NOT_THE_USERS.match(str(tag))]
    if own:
        where["tags"] = list(dict.fromkeys(own))[:_TAGS]
    return where


def put_inside(where: dict[str, Any], namespaces: Sequence[str]) -> None:
    """Begins a call's path with the tasks around its graph, given their namespaces."""
    if namespaces:
        outer = [name for namespace in namespaces for name in path_of(namespace)]
        where["path"] = [*outer, *where.get("path", ())][:_PATH_DEPTH]


def path_of(namespace: str) -> list[str]:
    """The node names of a checkpoint namespace, without task ids and counters.

    Example: ``"team:8f…|1|writer:03…"`` → ``["team", "writer"]``.
    """
    parts = namespace.split("|") if namespace else []
    return [part.split(":", 1)[0] for part in parts if not part.isdigit()]


def node_attempt() -> int:
    """Which attempt of its node this context runs in, by LangGraph's own count; 1 outside."""
    if var_child_runnable_config.get() is None:
        return 1
    try:
        # None where a plain runnable, not a graph, set the config.
        runtime = cast(Any, get_runtime())
    except (RuntimeError, KeyError):
        return 1
    info = runtime.execution_info if runtime is not None else None
    return info.node_attempt if info is not None else 1
