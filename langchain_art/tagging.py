"""Where a model call stands in its graph, said as `wire.CallTags` fields.

The one thing that the chat model and the capture handler share. The handler hears a call start in
the very context in which its request is then built, on all four paths (invoke, ainvoke, stream,
astream), so it leaves the call's tags in a context variable and the model picks them up. Without a
handler the tags come from the config that LangGraph put around the running node.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

from langchain_core.runnables.config import var_child_runnable_config
from langgraph.runtime import get_runtime

# The limits of `wire.CallTags`: a tag that is too long is cut, since a label must not cost a call.
_NAME_LENGTH = 256
_NAMESPACE_LENGTH = 2048
_PATH_DEPTH = 64


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
    if heard is not None and heard.open:
        return dict(heard.tags)
    config = var_child_runnable_config.get()
    return place(config.get("metadata") or {}, node_attempt()) if config else {}


def place(metadata: Mapping[str, Any], attempt: int = 1) -> dict[str, Any]:
    """What LangGraph's metadata of a run says about its place in the graph.

    Example::

        place({"langgraph_node": "inner", "langgraph_checkpoint_ns": "team:8f…|inner:03…"})
        # {"node": "inner", "namespace": "team:8f…|inner:03…", "path": ["team", "inner"]}

    A call that a middleware makes for itself (summaries, tool selection) ends its path with the
    name of its source.
    """
    tags: dict[str, Any] = {}
    if node := metadata.get("langgraph_node"):
        tags["node"] = str(node)[:_NAME_LENGTH]
    namespace = str(metadata.get("langgraph_checkpoint_ns") or "")
    path = path_of(namespace)
    if source := metadata.get("lc_source"):
        path.append(str(source))
    if namespace:
        tags["namespace"] = namespace[:_NAMESPACE_LENGTH]
    if path:
        tags["path"] = path[:_PATH_DEPTH]
    if isinstance(step := metadata.get("langgraph_step"), int):
        tags["step"] = step
    if (thread := metadata.get("thread_id")) is not None:
        tags["thread"] = str(thread)[:_NAME_LENGTH]
    if attempt > 1:
        tags["attempt"] = attempt
    return tags


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
