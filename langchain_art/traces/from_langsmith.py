"""Traces of LangSmith: its runs, as its API and its exports give them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from langsmith import APIConnectionError, Client, LangsmithError
from langsmith.utils import LangSmithConnectionError, LangSmithError

from langchain_art.errors import ConfigError, ServerUnreachable
from langchain_art.export.ids import HUMAN_REWARD
from langchain_art.export.stored_messages import message_of
from langchain_art.traces.stored import Read, StoredTrace, Unreadable, score_of
from langchain_art.wire import Message, Turn

#: LangChain's classes of messages, as they are serialised, and OpenAI's roles.
_CLASSES = {
    "HumanMessage": "user",
    "AIMessage": "assistant",
    "AIMessageChunk": "assistant",
    "SystemMessage": "system",
    "ToolMessage": "tool",
}


def read_langsmith(
    project: str,
    since: datetime | None = None,
    *,
    name: str = HUMAN_REWARD,
    limit: int = 1000,
) -> Read:
    """The newest traces of a project of LangSmith, with the feedback that they got.

    By its newer API (LangSmith's cloud, or self-hosted 0.16 and later), with the address and the
    key of the environment (``LANGSMITH_ENDPOINT``, ``LANGSMITH_API_KEY``). The mean of the feedback
    `name` is the score.

    Raises:
        ConfigError: LangSmith refuses the request: no such project, a wrong key, too old a server.
        ServerUnreachable: it gives no answer.
    """
    try:
        return traces_of_runs(asyncio.run(_runs(project, since, limit)), name)
    except (APIConnectionError, LangSmithConnectionError) as error:
        raise ServerUnreachable(f"LangSmith gave no answer: {error!s:.300}") from error
    except (LangsmithError, LangSmithError) as error:
        raise ConfigError(
            f"LangSmith refuses to read the project {project!r}: {error!s:.300}. Check "
            "LANGSMITH_API_KEY, LANGSMITH_ENDPOINT and the project's name."
        ) from error


async def _runs(project: str, since: datetime | None, limit: int) -> list[dict[str, Any]]:
    client = Client()
    project_id = str(client.read_project(project_name=project).id)
    asked: dict[str, Any] = {"project_ids": [project_id], "page_size": _PAGE, "selects": _SELECTED}
    found: list[dict[str, Any]] = []
    async for run in client.runs.query(is_root=True, min_start_time=since or _EVER, **asked):
        found.append(run.model_dump(mode="json"))
        if len(found) == limit:
            break
    if not found:
        return []
    traces = {run["trace_id"] for run in found}
    first = min(run["start_time"] for run in found)
    calls = client.runs.query(run_type="LLM", min_start_time=first, **asked)
    inner = [run async for run in calls if run.trace_id in traces and run.parent_run_ids]
    return found + [run.model_dump(mode="json") for run in inner]


_PAGE = 100
#: Without a time the API gives the last day.
_EVER = datetime(2000, 1, 1, tzinfo=UTC)
_SELECTED = [
    *("ID", "TRACE_ID", "PARENT_RUN_IDS", "RUN_TYPE", "START_TIME"),
    *("INPUTS", "OUTPUTS", "EXTRA", "ERROR", "FEEDBACK_STATS"),
]


def traces_of_runs(runs: Iterable[Mapping[str, Any]], name: str = HUMAN_REWARD) -> Read:
    """Traces from the runs of LangSmith, in any order, with the mean of the feedback `name`.

    Runs are as either of its APIs writes them: ``id``, ``trace_id``, ``parent_run_id`` (or
    ``parent_run_ids``), ``run_type``, ``inputs``, ``outputs``, ``extra``, ``start_time``,
    ``feedback_stats``.
    """
    by_trace: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        by_trace.setdefault(str(run.get("trace_id") or run.get("id")), []).append(run)
    found = Read()
    for trace, parts in by_trace.items():
        found.add(_trace, trace, parts, name)
    return found


def _trace(trace: str, parts: Sequence[Mapping[str, Any]], name: str) -> StoredTrace:
    ordered = sorted(parts, key=lambda run: str(run.get("start_time") or ""))
    parents = ("parent_run_id", "parent_run_ids")
    root = next((run for run in ordered if not any(map(run.get, parents))), None)
    if root is None:
        raise Unreadable("no_root")
    llms = [run for run in ordered if str(run.get("run_type")).lower() == "llm"]
    calls = [_call(run) for run in llms if not (run.get("error") and _is_empty(run.get("outputs")))]
    if not calls:
        raise Unreadable("no_calls")
    feedback = (root.get("feedback_stats") or {}).get(name) or {}
    return StoredTrace(
        id=trace,
        input=root.get("inputs"),
        output=root.get("outputs"),
        calls=calls,
        score=score_of([feedback.get("avg")]),
        failed=bool(root.get("error")),
    )


def _is_empty(outputs: Mapping[str, Any] | None) -> bool:
    """True if a call that failed left no reply to the graph, which may have asked again."""
    return not outputs or outputs.get("generations") in ([], [[]])


def _call(run: Mapping[str, Any]) -> Turn:
    """A call, whose reply keeps LangChain's metadata of the response."""
    extra = run.get("extra") or {}
    asked, metadata = extra.get("invocation_params") or {}, extra.get("metadata") or {}
    given = run["inputs"]["messages"]
    if given and isinstance(given[0], list):  # one list a prompt, of which there is one
        [given] = given
    reply, about = _message(_reply(run["outputs"]))
    messages = [_message(one)[0] for one in given]
    response = about.get("response_metadata") or {}
    return Turn(
        messages=tuple(messages),
        reply=reply,
        tools=tuple(asked.get("tools") or ()),
        ours=False,
        call_id=response.get("call_id") or response.get("id"),
        model=response.get("model_name") or metadata.get("ls_model_name"),
        node=metadata.get("langgraph_node"),
    )


def _reply(outputs: Mapping[str, Any]) -> Mapping[str, Any]:
    if "generations" not in outputs:
        return outputs.get("message") or outputs["messages"][-1]
    first = outputs["generations"][0]
    return (first[0] if isinstance(first, list) else first)["message"]


def _message(stored: Mapping[str, Any]) -> tuple[Message, Mapping[str, Any]]:
    """The message in OpenAI's shape, and all that was stored of it."""
    if "kwargs" not in stored:
        return message_of(stored), stored
    inner = dict(stored["kwargs"])
    inner.setdefault("role", _CLASSES.get(str(stored["id"][-1]), inner.get("type")))
    return message_of(inner), inner
