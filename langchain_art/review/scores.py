"""Langfuse's scores as reviews: what each is about, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from langchain_art.errors import ConfigError
from langchain_art.export.ids import CALL, HUMAN_REWARD, REWARD, TRAJECTORY
from langchain_art.export.langfuse_api import is_prefilled
from langchain_art.export.stored_messages import reply_of, text_in
from langchain_art.traces.stored import safe_id
from langchain_art.wire import Review
from langchain_art.wire.identifiers import MAX_REWARD

if TYPE_CHECKING:
    from langchain_art.export.langfuse_api import ObservationV2, ScoreV3

SOURCE = "langfuse"
#: Why a score becomes no review, and what can be done about it.
REASONS = {
    "not_about_a_run": "is about a session or an experiment, not about a trace",
    "no_trace": "its trace is not there, or not yet; it is looked for again at the next pull",
    "foreign_trace": "its trace has no id of a run: langchain-art did not export it "
    "(`langchain-art traces import` reads such traces)",
    "not_a_call": "is about a part of the run that is no model call; score the trace or a call",
    "prefilled": "was put there by a program for a person to verify, and none has saved it",
    "text": "is a text, which is no number",
    "unmapped": "its label has no value; give it one with --value LABEL=NUMBER",
    "out_of_range": f"its value is not between -{MAX_REWARD:g} and {MAX_REWARD:g}",
    "correction_of_run": "corrects a trace of several calls; correct the call that is to change",
    "empty_correction": "corrects nothing: its text is empty; a pull of all takes it back",
    "not_a_reply": "corrects a call with what is no assistant's message",
}


class LeftOut(Exception):
    """A score that becomes no review; its only argument is a key of `REASONS`."""


@dataclass(frozen=True)
class Reading:
    """Settings by which scores are read.

    Raises ConfigError for a name that langchain-art itself writes, or a value that is no number.
    """

    name: str = HUMAN_REWARD
    """The score that becomes the reward; people's others are kept beside it, as scores."""
    source: str = "ANNOTATION"
    """``ANNOTATION``: what people gave in the interface. ``API``: what programs sent, such as the
    feedback of an application's users; of these only the scores of `name` are read."""
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """Label of a categorical score -> value. ``true`` and ``false`` are 1 and 0 unless given."""

    def __post_init__(self) -> None:
        if self.source not in ("ANNOTATION", "API"):
            raise ConfigError(f"got the source {self.source!r}, expected ANNOTATION or API")
        if self.source == "API" and self.name == REWARD:
            raise ConfigError(
                f"got the score {REWARD!r} from programs, which langchain-art itself exports: it "
                "is no verdict of a person. Name the score that people's feedback has."
            )
        if wrong := [one for one in self.values.values() if not abs(one) <= MAX_REWARD]:
            raise ConfigError(f"got the values {wrong}, expected numbers within ±{MAX_REWARD:g}")


@dataclass
class Trace:
    """Facts that the observations of a trace give of the run that it shows."""

    run: str | None = None
    calls: dict[str, str] = field(default_factory=dict[str, str])
    """Observation's id -> call's id."""
    roots: set[str] = field(default_factory=set[str])


def traces_of(observations: Iterable[ObservationV2]) -> dict[str, Trace]:
    """Traces by id, from their observations with the groups ``basic`` and ``metadata``."""
    found: dict[str, Trace] = {}
    for one in observations:
        if one.trace_id is None:
            continue
        trace, metadata = found.setdefault(one.trace_id, Trace()), one.metadata or {}
        trace.run = trace.run or text_in(metadata.get(TRAJECTORY))
        if call := text_in(metadata.get(CALL)):
            trace.calls[one.id] = call
        if one.is_root_observation:
            trace.roots.add(one.id)
    return found


def subject_of(score: ScoreV3) -> tuple[str, str | None]:
    """The trace, and the observation if it is about one. Raises LeftOut."""
    subject = score.subject
    if subject is not None and subject.kind == "trace":
        return subject.id, None
    if subject is None or subject.kind != "observation":
        raise LeftOut("not_about_a_run")
    if subject.trace_id is None:
        raise LeftOut("no_trace")
    return subject.trace_id, subject.id


def is_empty(score: ScoreV3) -> bool:
    """True for a correction whose text was deleted."""
    return score.data_type == "CORRECTION" and not str(score.value).strip()


def review_of(score: ScoreV3, traces: Mapping[str, Trace], reading: Reading) -> Review:
    """The review that a score is. Raises LeftOut."""
    trace, observation = subject_of(score)
    if trace not in traces:
        raise LeftOut("no_trace")
    about = traces[trace]
    if about.run is None:
        raise LeftOut("foreign_trace")
    call = None
    if observation is not None and observation not in about.roots:
        call = about.calls.get(observation)
        if call is None:
            raise LeftOut("not_a_call")
    said: dict[str, Any] = {
        "id": safe_id(score.id),
        "source": SOURCE,
        "trajectory": about.run,
        "call_id": call,
        "name": score.name,
        "comment": score.comment,
        "reviewer": score.author_user_id,
        "at": score.updated_at.timestamp(),
    }
    if score.data_type == "CORRECTION":
        if is_empty(score):
            raise LeftOut("empty_correction")
        return _correction(str(score.value), about, said)
    if is_prefilled(score):
        raise LeftOut("prefilled")
    kind = "reward" if score.name == reading.name else "score"
    return Review(kind=kind, value=_value(score, reading.values), **said)


def _correction(text: str, about: Trace, said: dict[str, Any]) -> Review:
    if said["call_id"] is None:
        if len(about.calls) != 1:
            raise LeftOut("correction_of_run")
        [said["call_id"]] = about.calls.values()
    try:
        return Review(kind="correction", correction=reply_of(text), **said)
    except (ValueError, KeyError, TypeError) as error:
        raise LeftOut("not_a_reply") from error


def _value(score: ScoreV3, values: Mapping[str, float]) -> float:
    match score.data_type:
        case "NUMERIC":
            value = float(score.value)
        case "BOOLEAN":
            value = values.get(str(score.value).lower(), float(score.value))
        case "CATEGORICAL":
            if score.value not in values:
                raise LeftOut("unmapped")
            value = values[score.value]
        case _:
            raise LeftOut("text")
    if not math.isfinite(value) or abs(value) > MAX_REWARD:
        raise LeftOut("out_of_range")
    return value
