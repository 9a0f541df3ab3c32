"""The tags of a model call: its node, namespace, path and step, as fields of `wire.CallTags`.

The chat model and the tracing handler share this module. LangChain runs a handler's
`on_chat_model_start` in the context in which the model then builds the request (for ``invoke``,
``ainvoke``, ``stream`` and ``astream``). The handler publishes the call's tags in a context
variable, and the model reads them from there.

Without a `capture()`, each `ChatART` tags its calls with its own `MetadataTagger`. A graph that
runs in another process (on LangGraph's server, in a job) needs no capture: the caller names the
trajectory in the config's metadata, and the server assembles it when it is scored::

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

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.outputs import LLMResult
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.runtime import get_runtime

from langchain_art.wire import scenario_name

# The limits of `wire.CallTags`. Longer tags are cut: a label must not make a call fail.
_NAME_LENGTH = 256
_NAMESPACE_LENGTH = 2048
_PATH_DEPTH = 64
_TAGS = 32
# Tags that LangChain and LangGraph add for their own use.
_FRAMEWORK_TAGS = re.compile(r"(seq:step|map:key|graph:step|retry:attempt|langsmith):|nostream$")


@dataclass(slots=True)
class PendingTags:
    """The tags of a model call that has started and not ended."""

    run_id: UUID
    serial: int
    """The handler's number. If several handlers tag one call, the highest number wins."""
    tags: dict[str, Any]
    within: PendingTags | None = None
    """Tags of the call around it, if a chat model makes it to answer another call."""
    open: bool = True
    """False once the call has ended. The context variable cannot be reset at that point, because
    LangChain ends asynchronous calls in a copy of the context."""


_PENDING: ContextVar[PendingTags | None] = ContextVar("langchain_art_call_tags", default=None)


def publish_tags(pending: PendingTags) -> None:
    """Makes a call's tags visible to the model that sends the call in this context."""
    known = _PENDING.get()
    if known is None or known.run_id != pending.run_id:
        pending.within = _open_pending()
    elif known.serial < pending.serial:
        pending.within = known.within
    else:
        return
    _PENDING.set(pending)


def _open_pending() -> PendingTags | None:
    pending = _PENDING.get()
    while pending is not None and not pending.open:
        pending = pending.within
    return pending


def enclosing_call(run_id: UUID) -> UUID | None:
    """The run of the model call that this context answers when it starts the run `run_id`."""
    pending = _open_pending()
    while pending is not None and pending.run_id == run_id:
        pending = pending.within
    return pending.run_id if pending is not None else None


def current_tags() -> dict[str, Any]:
    """The tags of the call that this context is about to send; empty outside of graphs and runs.

    Holds only fields that are known and differ from their defaults, in JSON types.
    """
    pending = _open_pending()
    return dict(pending.tags) if pending is not None else {}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The running node, chain or tool around a call, by LangChain's config for what is run in it.

    A call with callbacks of its own (``invoke(…, {"callbacks": […]})``, ``with_config``,
    ``generate``) does not get its parent run, nor, in part, the parent's metadata and tags.
    """

    run_id: UUID
    """The parent run."""
    metadata: dict[str, Any]
    tags: list[str]

    def complete(self, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        """A call's metadata with what it lacks of its surroundings'."""
        return {**self.metadata, **(metadata or {})}


def surroundings() -> Surroundings | None:
    """Run, metadata and tags around this context; None outside of nodes, chains and tools."""
    config = var_child_runnable_config.get()
    manager = config.get("callbacks") if config else None
    if not isinstance(manager, BaseCallbackManager) or manager.parent_run_id is None:
        return None
    assert config is not None
    return Surroundings(
        manager.parent_run_id,
        {**manager.inheritable_metadata, **(config.get("metadata") or {})},
        [*manager.inheritable_tags, *(config.get("tags") or ())],
    )


class MetadataTagger(BaseCallbackHandler):
    """A model's own handler: tags calls from their metadata if no tracing handler does."""

    run_inline = True

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Publishes the call's tags."""
        metadata, tags = kwargs.get("metadata") or {}, kwargs.get("tags") or ()
        if kwargs.get("parent_run_id") is None and (around := surroundings()) is not None:
            metadata = around.complete(metadata)
            tags = [*around.tags, *tags]
        attempt, began = node_execution()
        sent = tags_from_metadata(metadata, attempt, tags)
        if began is not None and "namespace" in sent:
            sent["task_began"] = began
        if (value := metadata.get("art_trajectory_id")) is not None:
            sent["trajectory_id"] = str(value)
        if (value := metadata.get("art_scenario")) is not None:
            sent["scenario"] = scenario_name(str(value))
        publish_tags(PendingTags(run_id, -1, sent))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Withdraws the call's tags."""
        self._withdraw(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Withdraws the call's tags."""
        self._withdraw(run_id)

    def _withdraw(self, run_id: UUID) -> None:
        pending = _PENDING.get()
        if pending is not None and pending.run_id == run_id:
            pending.open = False


METADATA_TAGGER = MetadataTagger()


def tags_from_metadata(
    metadata: Mapping[str, Any], attempt: int = 1, tags: Sequence[str] = ()
) -> dict[str, Any]:
    """The tags of a call, read from LangGraph's metadata and the user's tags.

    Example::

        at = {"langgraph_node": "inner", "langgraph_checkpoint_ns": "team:8f|inner:03"}
        tags_from_metadata(at)
        # {"node": "inner", "namespace": "team:8f|inner:03", "path": ["team", "inner"]}

    The path of a call that a middleware makes for itself (summaries, tool selection) ends with the
    name of the middleware's ``lc_source``. LangGraph's nodes have no tags; metadata tags them:
    ``add_node("writer", …, metadata={"art_tags": ["main"]})``.
    """
    art_tags = metadata.get("art_tags") or ()
    user_tags = [*tags, *([art_tags] if isinstance(art_tags, str) else art_tags)]
    found: dict[str, Any] = {}
    if node := metadata.get("langgraph_node"):
        found["node"] = str(node)[:_NAME_LENGTH]
    namespace = str(metadata.get("langgraph_checkpoint_ns") or "")
    path = node_names(namespace)
    if source := metadata.get("lc_source"):
        path.append(str(source))
    if namespace:
        found["namespace"] = namespace[:_NAMESPACE_LENGTH]
    if path:
        found["path"] = path[:_PATH_DEPTH]
    if isinstance(step := metadata.get("langgraph_step"), int):
        found["step"] = step
    if (thread := metadata.get("thread_id")) is not None:
        found["thread"] = str(thread)[:_NAME_LENGTH]
    if attempt > 1:
        found["attempt"] = attempt
    own = [str(tag) for tag in user_tags if tag and not _FRAMEWORK_TAGS.match(str(tag))]
    if own:
        found["tags"] = list(dict.fromkeys(tag[:_NAME_LENGTH] for tag in own))[:_TAGS]
    return found


def prepend_outer_path(tags: dict[str, Any], namespaces: Sequence[str]) -> None:
    """Puts the nodes of the enclosing tasks, given by namespace, in front of a call's path."""
    if namespaces:
        outer = [name for namespace in namespaces for name in node_names(namespace)]
        tags["path"] = [*outer, *tags.get("path", ())][:_PATH_DEPTH]


def node_names(namespace: str) -> list[str]:
    """The node names of a checkpoint namespace, without task ids and counters.

    Example: ``"team:8f…|1|writer:03…"`` → ``["team", "writer"]``.
    """
    parts = namespace.split("|") if namespace else []
    return [part.split(":", 1)[0] for part in parts if not part.isdigit()]


def node_execution() -> tuple[int, float | None]:
    """The attempt of the node around, from 1, and when its first one began; 1, None outside."""
    if var_child_runnable_config.get() is None:
        return 1, None
    try:
        # None where a plain runnable, not a graph, set the config.
        runtime = cast(Any, get_runtime())
    except (RuntimeError, KeyError):
        return 1, None
    info = runtime.execution_info if runtime is not None else None
    return (info.node_attempt, info.node_first_attempt_time) if info is not None else (1, None)
