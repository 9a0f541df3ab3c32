"""The attributes of a run's spans, and its scores as Langfuse's SDK 5 posts them.

`gen_ai.*` is for all, and beside it Langfuse's own or the messages'. Sources: OpenTelemetry's
semantic conventions (https://opentelemetry.io/docs/specs/semconv/gen-ai/), and what Langfuse reads
(https://langfuse.com/integrations/native/opentelemetry, `LangfuseOtelSpanAttributes` of its SDK 5).
Langfuse is given the texts once, under its own names; another backend under `gen_ai.*`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TypeAlias

from langchain_art.export import ids
from langchain_art.export.brief import brief, last_message
from langchain_art.export.records import ExportBatch, ExportedRun, SpanRecord
from langchain_art.wire import Message, Trajectory, Turn
from langchain_art.wire.redaction import Redactor

dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode


class MessageTexts:
    """Prompts, replies and tools of a run's turns; `form` is of a sent message, if not OpenAI's."""

    def __init__(
        self,
        run: Trajectory,
        redactor: Redactor,
        form: Callable[[Message], dict[str, Any]] | None = None,
    ) -> None:
        self._turns = run.turns
        self._redactor = redactor
        self._form = form
        replies = (one.reply for one in run.turns)
        self._replies = [None if one is None else self._text(one) for one in replies]
        self._prompts: list[list[str]] = []
        for one in run.turns:
            before: list[str] = []
            if one.extends is not None:
                said = self._replies[one.extends]
                before = [*self._prompts[one.extends], *([] if said is None else [said])]
            self._prompts.append(before + [self._text(message) for message in one.messages])
        self._tools: list[tuple[Any, str]] = []

    def prompt(self, turn: int) -> str:
        """All messages of a turn's prompt: a JSON list."""
        return f"[{','.join(self._prompts[turn])}]"

    def reply(self, turn: int) -> str | None:
        """A turn's reply: a JSON object. None: it gave none."""
        return self._replies[turn]

    def tools(self, turn: int) -> str | None:
        """The tools that a turn's model was given: a JSON list. None: none."""
        given = self._turns[turn].tools
        if not given:
            return None
        for known, text in self._tools:
            if known == given:
                return text
        text = dumps(self._redactor.value(list(given)))
        self._tools.append((given, text))
        return text

    def _text(self, message: Message) -> str:
        clean = self._redactor.value(message)
        return dumps(clean if self._form is None else self._form(clean))


Attributes: TypeAlias = "dict[str, Any]"
_OBSERVATION, _TRACE = "langfuse.observation.", "langfuse.trace."
_TYPES = {"graph": "chain", "node": "span", "tool": "tool", "model": "generation"}
_OPERATIONS = {"tool": "execute_tool", "model": "chat"}
#: LangChain's names of a call's parameters, and the conventions' (``gen_ai.request.*``).
PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "seed": "seed",
    "stop": "stop_sequences",
    "n": "choice.count",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}
#: Key in `Trajectory.metadata` of an evaluator's explanations (`evaluators.base.JUDGED`).
_JUDGED = "judged"
#: Keys of a run's metadata that other attributes give.
_OWN = (_JUDGED, ids.EXPORTED)
#: Longest session and user that Langfuse keeps.
_NAME = 200


class RunAttributes:
    """The attributes of one run's spans."""

    def __init__(self, run: ExportedRun, redactor: Redactor, *, langfuse: bool) -> None:
        self._run = run
        self._redactor = redactor
        self._langfuse = langfuse
        form = None if langfuse else gen_ai_message
        self._texts = MessageTexts(run.trajectory, redactor, form)
        self._common = _given(self._of_all())

    def root(self) -> Attributes:
        """Attributes of the span that is the run."""
        run, labels = self._run.trajectory, self._run.labels
        given = self._json(brief(run.input))
        gave = self._json(brief(last_message(run.output)))
        metadata = {
            "status": run.status,
            **labels.metadata,
            **{name: one for name, one in run.metadata.items() if name not in _OWN},
        }
        found = self._common | {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": labels.name,
        }
        if not self._langfuse:
            return found | self._plain(given, gave, metadata)
        failed = run.status in ("failed", "truncated")
        return found | _given(
            {
                f"{_OBSERVATION}type": "agent",
                f"{_OBSERVATION}input": given,
                f"{_OBSERVATION}output": gave,
                f"{_OBSERVATION}level": "ERROR" if failed else None,
                f"{_OBSERVATION}status_message": self._clean(run.error)
                or (run.status if run.status != "completed" else None),
                **self._metadata(metadata),
            }
        )

    def span(self, span: SpanRecord) -> Attributes:
        """Attributes of a node, a tool or a model call."""
        found = dict(self._common)
        if operation := _OPERATIONS.get(span.kind):
            found["gen_ai.operation.name"] = operation
        if span.turn is not None:
            return found | self._call(span, span.turn, self._run.trajectory.turns[span.turn])
        given, gave = self._json(span.input), self._json(span.output)
        metadata = _where(span)
        if span.kind == "tool":
            found["gen_ai.tool.name"] = span.name
        if not self._langfuse:
            if span.kind == "tool":
                names = ("gen_ai.tool.call.arguments", "gen_ai.tool.call.result")
                found |= _given(dict(zip(names, (given, gave), strict=True)))
                given = gave = None
            return found | self._plain(given, gave, metadata)
        return found | _given(
            {
                f"{_OBSERVATION}type": _TYPES[span.kind],
                f"{_OBSERVATION}input": given,
                f"{_OBSERVATION}output": gave,
                **self._level(span, None),
                **self._metadata(metadata),
            }
        )

    def _call(self, span: SpanRecord, index: int, turn: Turn) -> Attributes:
        usage = turn.usage
        texts = self._texts
        why = turn.excluded_because
        if why is None and self._run.excluded:
            why = self._run.excluded[index]
        metadata = {
            **_where(span),
            ids.CALL: turn.call_id,
            "call_index": index,
            "langgraph_node": turn.node,
            "langgraph_step": turn.step,
            ids.EXCLUDED: why,
            "reward": turn.reward,
            "tags": list(turn.tags) or None,
        }
        found: Attributes = {
            "gen_ai.provider.name": "langchain_art" if turn.ours else None,
            "gen_ai.request.model": (turn.model or "").partition("@")[0] or None,
            "gen_ai.response.model": turn.model,
            "gen_ai.response.id": turn.call_id,
            "gen_ai.usage.input_tokens": usage and usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage and usage.completion_tokens,
        }
        tools, reply = texts.tools(index), texts.reply(index)
        if not self._langfuse:
            found |= {
                "gen_ai.input.messages": texts.prompt(index),
                "gen_ai.output.messages": None if reply is None else f"[{reply}]",
                "gen_ai.tool.definitions": tools,
                **{f"gen_ai.request.{PARAMETERS[n]}": one for n, one in span.parameters.items()},
                **self._plain(None, None, metadata),
            }
            return _given(found)
        prompt, first = texts.prompt(index), span.first_token_at
        if tools is not None:
            prompt = f'{{"messages":{prompt},"tools":{tools}}}'
        found |= {
            f"{_OBSERVATION}type": "generation",
            f"{_OBSERVATION}input": prompt,
            f"{_OBSERVATION}output": reply,
            f"{_OBSERVATION}model.name": turn.model,
            f"{_OBSERVATION}model.parameters": dumps(span.parameters) if span.parameters else None,
            f"{_OBSERVATION}completion_start_time": None if first is None else dumps(iso(first)),
            **self._level(span, why),
            **self._metadata(metadata),
        }
        if usage is not None:
            asked, said = usage.prompt_tokens, usage.completion_tokens
            details = {"input": asked, "output": said, "total": asked + said}
            found[f"{_OBSERVATION}usage_details"] = dumps(details)
        return _given(found)

    def _of_all(self) -> Attributes:
        run, labels = self._run, self._run.labels
        session = labels.session[:_NAME] if labels.session else None
        found: Attributes = {"gen_ai.conversation.id": session}
        if not self._langfuse:
            return found
        experiment, scenario = labels.experiment, run.trajectory.scenario
        found = {
            "langfuse.environment": labels.environment,
            "langfuse.version": run.version,
            f"{_TRACE}name": labels.name[:_NAME],
            f"{_TRACE}tags": [tag[:_NAME] for tag in labels.tags] or None,
            "session.id": session,
            "user.id": labels.user[:_NAME] if labels.user else None,
        }
        if experiment is not None:
            root = ids.root_id(run.trajectory.id)
            found |= {
                "langfuse.experiment.id": experiment.id,
                "langfuse.experiment.name": experiment.name,
                "langfuse.experiment.metadata": dumps(experiment.metadata),
                "langfuse.experiment.item.id": scenario,
                "langfuse.experiment.item.root_observation_id": root,
            }
        return found

    def _plain(
        self, given: str | None, gave: str | None, metadata: Mapping[str, Any]
    ) -> Attributes:
        values = {
            f"langchain_art.{name}": _flat(one) for name, one in self._known(metadata).items()
        }
        return _given(values | {"input.value": given, "output.value": gave})

    def _metadata(self, metadata: Mapping[str, Any]) -> Attributes:
        known = self._known(metadata)
        return {f"{_OBSERVATION}metadata.{name}": dumps(one) for name, one in known.items()}

    def _known(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """A span's metadata, with what is read back of each span."""
        run = self._run.trajectory
        return {
            ids.TRAJECTORY: run.id,
            **_given({ids.SCENARIO: run.scenario}),
            **self._redactor.value(_given(metadata)),
        }

    def _level(self, span: SpanRecord, why: str | None) -> Attributes:
        failed = span.outcome == "error"
        told = self._clean(span.error)
        if told is None and why is not None:
            told = f"excluded: {why}"
        if told is None and span.outcome == "interrupted":
            told = "interrupted"
        return {
            f"{_OBSERVATION}level": "ERROR" if failed else None,
            f"{_OBSERVATION}status_message": told,
        }

    def _json(self, value: Any) -> str | None:
        if value is None:
            return None
        clean = self._redactor.value(value)
        return clean if isinstance(clean, str) else dumps(clean)

    def _clean(self, text: str | None) -> str | None:
        return None if text is None else self._redactor.text(text)


def gen_ai_message(message: Message) -> dict[str, Any]:
    """A message of OpenAI's shape in that of the conventions: a role and its parts.

    Source: the JSON schemas of ``gen_ai.input.messages`` and ``gen_ai.output.messages``.
    """
    parts: list[dict[str, Any]] = []
    content, role = message.get("content"), message.get("role", "user")
    if role == "tool":
        told = {"id": message.get("tool_call_id"), "response": content}
        return {"role": role, "parts": [{"type": "tool_call_response", **told}]}
    if reasoning := message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": reasoning})
    if isinstance(content, str) and content:
        parts.append({"type": "text", "content": content})
    elif isinstance(content, list):
        for block in content:
            text = block.get("text") if isinstance(block, dict) else None
            parts.append({"type": "text", "content": text} if text is not None else dict(block))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        known = {"id": call.get("id"), "name": function.get("name")}
        parts.append({"type": "tool_call", **known, "arguments": function.get("arguments")})
    return {"role": role, "parts": parts}


def iso(seconds: float) -> str:
    """Seconds since the epoch as ISO 8601 with microseconds, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _where(span: SpanRecord) -> dict[str, Any]:
    return {
        "path": "/".join(span.path) or None,
        "namespace": span.namespace or None,
        "attempt": span.attempt if span.attempt > 1 else None,
        "outcome": span.outcome if span.outcome != "ok" else None,
    }


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in values.items() if one is not None}


def _flat(value: Any) -> Any:
    return value if isinstance(value, str | bool | int | float) else dumps(value)


TRAINED = "trained_tokens"


def scores_of(batch: ExportBatch, redactor: Redactor) -> list[dict[str, Any]]:
    """All scores of a batch.

    On the trace: ``reward``; each entry of `Trajectory.scores` (a judge's with its explanation as
    the comment); ``trained_tokens``. On a call's observation: ``reward``, where it has one of its
    own. On an experiment: its means. The same score has the same id and time when it is sent again.
    """
    found = [one for run in batch.runs for one in _of_run(run, redactor)]
    for experiment, values in batch.experiments.items():
        at = max((run.ended_at for run in batch.runs), default=0.0)
        for name, value in values.items():
            subject = {"datasetRunId": experiment, "environment": "eval"}
            found.append(_score(experiment, name, value, at) | subject)
    return found


def explained(run: Trajectory, redactor: Redactor) -> dict[str, tuple[float, str | None]]:
    """A run's scores and its reward by name, each with its judge's explanation, if there is one."""
    values = dict(run.scores)
    if run.reward is not None:
        values[ids.REWARD] = run.reward
    judged = run.metadata.get(_JUDGED)
    said: dict[str, Any] = judged if isinstance(judged, dict) else {}
    return {
        name: (value, redactor.text(str(why)) if (why := said.get(name)) else None)
        for name, value in values.items()
    }


def _of_run(run: ExportedRun, redactor: Redactor) -> Iterator[dict[str, Any]]:
    trajectory, at = run.trajectory, run.ended_at
    trace = ids.trace_id(trajectory.id)
    said = explained(trajectory, redactor)
    if run.trained_tokens is not None:
        said[TRAINED] = float(run.trained_tokens), None
    subject = {"traceId": trace, "environment": run.labels.environment}
    for name, (value, why) in said.items():
        comment = {} if why is None else {"comment": why}
        yield _score(trace, name, value, at) | subject | comment
    for index, turn in enumerate(trajectory.turns):
        if turn.reward is not None:
            observation = ids.turn_observation_id(trajectory.id, turn, index)
            score = _score(observation, ids.REWARD, turn.reward, at)
            yield score | subject | {"observationId": observation}


def _score(subject: str, name: str, value: float, at: float) -> dict[str, Any]:
    return {
        "id": ids.score_id(subject, name),
        "name": name,
        "value": value,
        "dataType": "NUMERIC",
        "timestamp": iso(at),
    }
