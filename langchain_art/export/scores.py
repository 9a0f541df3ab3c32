"""The scores of runs, as Langfuse's SDK 5 posts them: one JSON list to ``/api/public/scores``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_art.export import ids, names
from langchain_art.export.attributes import iso
from langchain_art.export.records import ExportBatch, ExportedRun
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


def _of_run(run: ExportedRun, redactor: Redactor) -> Iterator[dict[str, Any]]:
    trajectory, at = run.trajectory, run.ended_at
    trace = ids.trace_id(trajectory.id)
    values = dict(trajectory.scores)
    if trajectory.reward is not None:
        values[names.REWARD] = trajectory.reward
    if run.trained_tokens is not None:
        values[TRAINED] = float(run.trained_tokens)
    judged = trajectory.metadata.get(_JUDGED)
    said = judged if isinstance(judged, dict) else {}
    subject = {"traceId": trace, "environment": run.labels.environment}
    for name, value in values.items():
        score = _score(trace, name, value, at) | subject
        if why := said.get(name):
            score["comment"] = redactor.text(str(why))
        yield score
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
