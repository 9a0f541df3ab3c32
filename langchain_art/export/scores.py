"""The scores of runs, as Langfuse's SDK 5 posts them: one JSON list to ``/api/public/scores``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_art.export import ids, names
from langchain_art.export.attributes import iso
from langchain_art.export.records import ExportBatch, ExportedRun
from langchain_art.wire import Trajectory
from langchain_art.wire.redaction import Redactor

TRAINED = "trained_tokens"
#: Key in `Trajectory.metadata` of an evaluator's explanations (`evaluators.base.JUDGED`).
_JUDGED = "judged"


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
        values[names.REWARD] = run.reward
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
            score = _score(observation, names.REWARD, turn.reward, at)
            yield score | subject | {"observationId": observation}


def _score(subject: str, name: str, value: float, at: float) -> dict[str, Any]:
    return {
        "id": ids.score_id(subject, name),
        "name": name,
        "value": value,
        "dataType": "NUMERIC",
        "timestamp": iso(at),
    }
