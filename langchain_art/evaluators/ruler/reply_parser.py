"""Parses a judge's reply strictly: every run once, by its id, with a finite score in [0, 1]."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

from langchain_core.messages import AIMessage
from pydantic import BaseModel, Field, ValidationError

from langchain_art.evaluators.base import Score

_LONGEST = 200_000  # characters of a reply that are read
_STARTS = 200  # most JSON values in it
_LITERAL = 6  # most characters of a number or word that is cut off
_START = re.compile(r"[\[{]")
_WORD = re.compile(r"\w+")
_THOUGHT = "</think>"


class RunScore(BaseModel):
    """One run's score."""

    id: str = Field(description="the run's id, as its tag names it")
    explanation: str = Field(description="one short sentence: why this score, beside the others")
    score: float = Field(description="from 0 (worst) to 1 (best)")


class Verdict(BaseModel):
    """The scores of all runs, each exactly once."""

    scores: list[RunScore]

    @classmethod
    def model_validate_json(cls, *given: Any, **options: Any) -> Self:
        """A verdict; without scores if the text is none, so that the reply itself can be read.

        OpenAI's SDK parses replies with it: an error would be all that is left of the reply.
        """
        try:
            return super().model_validate_json(*given, **options)
        except ValidationError:
            return cls(scores=[])


class UnusableReply(Exception):
    """A reply without a complete verdict. The message says what is wrong with it."""


def read(reply: AIMessage, ids: Sequence[str]) -> dict[str, Score]:
    """The verdict of a reply: id -> score.

    Read are a tool call's arguments, if there are any, else the JSON in the text after a reasoning
    model's thoughts. If several JSON values name runs of the question (a draft, for example), each
    must be complete and all must agree; so must any other score of a run, such as ``final_scores``
    beside ``scores``, or ``bcd: 0.5`` in words. Values that name no run are ignored. Raises
    UnusableReply if the text ends within a value, a value or call with runs cannot be read, or it
    is not exactly one valid score for each of `ids`.
    """
    if reply.invalid_tool_calls:
        raise UnusableReply("it holds a tool call whose arguments are no JSON")
    values, rest = [cast("Any", call["args"]) for call in reply.tool_calls], ""
    if not values:
        values, rest = _json_in(str(reply.text).rpartition(_THOUGHT)[2])
    pieces = [entries for value in values if (entries := _entries(value))]
    verdicts = [_verdict(piece, ids) for piece in pieces if not _names(piece).isdisjoint(ids)]
    if not verdicts:
        others = sorted({name for piece in pieces for name in _names(piece)})
        raise UnusableReply(
            f"it scores {', '.join(others):.80}, which are no runs of this request"
            if pieces
            else 'it holds no complete JSON object with a list "scores"'
        )
    said = {name: score.value for name, score in verdicts[0].items()}
    for value in values:
        scores = list(_mentioned(value, ids))
        if scores and _names(_entries(value)).isdisjoint(ids):
            raise UnusableReply('it scores runs outside of a list "scores"')
        if any(score != said[name] for name, score in scores):
            raise UnusableReply("it holds several verdicts that differ")
    if any(said.get(name) != score for name, score in _in_words(rest, ids)):
        raise UnusableReply("beside its JSON it scores runs in another form")
    return verdicts[0]


def _mentioned(value: Any, ids: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Scores of runs anywhere in a JSON value: in entries, and in objects with runs as keys.

    None: an entry is no score of one run.
    """
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, dict):
            # What stands under a run's own name may be a remark, if it is no number.
            scored = {k: n for k, n in one.items() if k not in ids or isinstance(n, int | float)}
            if "id" in one:
                scored = {str(one["id"]): one.get("score")} | scored
            for name, score in scored.items():
                yield from (
                    (word, score if word == name else None)
                    for word in {*_WORD.findall(name)}.intersection(ids)
                )
            open_values += one.values()
        elif isinstance(one, list):
            open_values += one


def _in_words(text: str, ids: Sequence[str]) -> Iterator[tuple[str, float | None]]:
    """Scores of runs outside of JSON: ``bcd: 0.5``; None for an entry (``id: bcd``)."""
    names = "|".join(map(re.escape, ids))
    for entry in re.finditer(rf"""\bid["'\\]*\s*[:=][\s\["'\\]*({names})\b""", text):
        yield entry[1], None
    for scored in re.finditer(rf"""\b({names})["'\\]*\s*[:=][\s"'\\]*(-?[\d.]*\d)""", text):
        try:
            yield scored[1], float(scored[2])
        except ValueError:
            yield scored[1], None


def _json_in(text: str) -> tuple[list[Any], str]:
    """The outermost JSON values in a text, and the text outside of them.

    Nothing inside of an incomplete value is read.
    """
    text = text[:_LONGEST].rstrip()
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    values, rest = list[Any](), list[str]()
    position, starts, ended = 0, 0, 0
    while (found := _START.search(text, position)) is not None:
        starts += 1
        if starts > _STARTS:
            raise UnusableReply(f"it begins more than {_STARTS} JSON values")
        try:
            value, position = decoder.raw_decode(text, found.start())
        except json.JSONDecodeError as error:
            if error.pos >= len(text) - _LITERAL or error.msg.startswith("Unterminated"):
                raise UnusableReply("it is cut off within its JSON") from error
            position = max(found.end(), error.pos)
        except (RecursionError, ValueError) as error:
            raise UnusableReply(f"its JSON cannot be read: {error}") from error
        else:
            values.append(value)
            rest.append(text[ended : found.start()])
            ended = position
    return values, "\n".join([*rest, text[ended:]])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has one key twice")
    return found


def _entries(value: Any) -> list[dict[str, Any]]:
    """The entries of a value in a verdict's form; else none."""
    scores = value.get("scores") if isinstance(value, dict) else value
    if not isinstance(scores, list):
        return []
    # An item of another type becomes an empty entry, which makes the verdict unusable.
    return [one if isinstance(one, dict) else {} for one in scores]


def _names(entries: Sequence[dict[str, Any]]) -> set[str]:
    """The entries' ids, and the words in them: ``"bcd, fgh"`` and ``["bcd", "fgh"]`` name two."""
    ids = [str(entry.get("id")) for entry in entries]
    return {name for one in ids for name in (one, *_WORD.findall(one))}


def _verdict(entries: Sequence[dict[str, Any]], ids: Sequence[str]) -> dict[str, Score]:
    found: dict[str, Score] = {}
    for entry in entries:
        name, score = entry.get("id"), entry.get("score")
        if not isinstance(name, str) or name not in ids:
            raise UnusableReply(f"it scores {name!r:.40}, which is no run of this request")
        if name in found:
            raise UnusableReply(f"it scores {name} more than once")
        # A comparison with NaN is False.
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
            raise UnusableReply(
                f"the score of {name} is {_short(score)}, expected a number from 0 to 1"
            )
        explanation = entry.get("explanation")
        found[name] = Score(
            float(score), explanation[:2000] if isinstance(explanation, str) else ""
        )
    if missing := [name for name in ids if name not in found]:
        raise UnusableReply(f"it leaves out {', '.join(missing)}")
    return found


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 100:  # more digits than Python would print
        return "a huge number"
    return f"{value!r:.40}"
