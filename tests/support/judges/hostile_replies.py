"""A generator of judge replies, each with the verdicts that it may be read as.

A reply is drawn from three lists: what is wrong with the verdict, how it is written, and what
stands around it. Nothing of it is taken from the parser: a reply whose verdict is damaged, or that
states another one, too, may give none; any other may give the one that it states, or none.
"""

import base64
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage

Entries = list[dict[str, Any]]


@dataclass(frozen=True)
class Reply:
    """A judge's reply.

    Attributes:
        kind: what was drawn.
        content: the reply.
        stated: the verdict that it may give, by run; None: it may give none.
        plain: it must give that verdict.
    """

    kind: str
    content: Any
    stated: dict[str, float] | None
    plain: bool


def drawn(entries: Entries, chance: random.Random) -> Reply:
    """One reply about runs, of which `entries` is the verdict."""
    damage = chance.choice(["none"] * len(DAMAGES) + list(DAMAGES))
    damaged = DAMAGES[damage](_copy(entries), chance) if damage != "none" else entries
    form = chance.choice(["JSON"] * 10 + list(FORMS))
    written, readable = FORMS[form](damaged, chance)
    place = chance.choice(list(PLACES))
    content, other = PLACES[place](written, entries, chance)
    sound = damage in ("none", *HARMLESS) and readable is not None
    stated = damaged if sound and other is None else None
    if other is not None and place in ANOTHER and not sound:
        # The other one is the reply's last word, or there is no word of these runs beside it.
        silent = damage in NOBODY or form in UNSEEN or not any(e["id"] in written for e in entries)
        stated = other if silent or place != "behind another" else None
    return Reply(
        f"{damage} / {form} / {place}",
        content,
        None if stated is None else {one["id"]: float(one["score"]) for one in stated},
        stated is damaged and readable is True and place in TRANSPARENT,
    )


def _copy(entries: Entries) -> Entries:
    return [dict(one) for one in entries]


def _some(entries: Entries, chance: random.Random, **fields: Callable[[Any], Any]) -> Entries:
    """`entries` with fields of one of them changed."""
    one = chance.choice(entries)
    for name, change in fields.items():
        one[name] = change(one[name])
    return entries


def _score(change: Callable[[Any], Any]) -> Callable[[Entries, random.Random], Entries]:
    return lambda entries, chance: _some(entries, chance, score=change)


def _id(change: Callable[[str], Any]) -> Callable[[Entries, random.Random], Entries]:
    return lambda entries, chance: _some(entries, chance, id=change)


def _renamed(old: str, new: str) -> Callable[[Entries, random.Random], Entries]:
    def rename(entries: Entries, chance: random.Random) -> Entries:
        one = chance.choice(entries)
        one[new] = one.pop(old)
        return entries

    return rename


_LOOK_ALIKE = {"c": "с", "p": "р", "x": "х", "s": "ѕ", "j": "ј"}  # noqa: RUF001 - Cyrillic
HARMLESS = ("the smallest", "minus zero", "an integer", "a field more")
#: What is wrong with a verdict; of the harmless ones, nothing.
DAMAGES: dict[str, Callable[[Entries, random.Random], Entries]] = {
    "the smallest": _score(lambda s: 5e-324),
    "minus zero": _score(lambda s: -0.0),
    "an integer": _score(lambda s: 1),
    "a field more": lambda e, r: [{**one, "confidence": 9} for one in e],
    "NaN": _score(lambda s: float("nan")),
    "infinity": _score(lambda s: float("inf")),
    "7.0": _score(lambda s: 7.0),
    "-0.1": _score(lambda s: -0.1),
    "a huge integer": _score(lambda s: 10**400),
    "1e308": _score(lambda s: 1e308),
    "a text": _score(str),
    "true": _score(lambda s: True),
    "null": _score(lambda s: None),
    "a list": _score(lambda s: [0.1]),
    "per cent": _score(lambda s: f"{s:.0%}"),
    "a fraction": _score(lambda s: f"{s * 10:.0f}/10"),
    "of ten": _score(lambda s: 2 + s * 8),
    "just above one": _score(lambda s: 1 + 2**-52),
    "just below zero": _score(lambda s: -5e-324),
    "a word": _score(lambda s: chr(0xFF10 + int(s * 9))),  # a full-width digit
    "an imaginary number": _score(lambda s: f"{s}j"),
    "a score in an object": _score(lambda s: {"value": s}),
    "a range": _score(lambda s: [s - 0.1, s + 0.1]),
    "false": _score(lambda s: False),
    "a comma": _score(lambda s: f"{s:.2f}".replace(".", ",")),
    "a look-alike": _id(
        lambda i: "".join(_LOOK_ALIKE.get(c, c) for c in i) if set(i) & set(_LOOK_ALIKE) else f"{i}́"
    ),
    "a zero-width space": _id(lambda i: f"{i[0]}\u200b{i[1:]}"),
    "a space behind": _id(lambda i: f"{i} "),
    "a line behind": _id(lambda i: f"{i}\n"),
    "a null behind": _id(lambda i: f"{i}\0"),
    "a full-width letter": _id(lambda i: chr(ord(i[0]) + 0xFEE0) + i[1:]),
    "a word before": _id(lambda i: f"run {i}"),
    "quotes": _id(lambda i: f"'{i}'"),
    "a tag": _id(lambda i: f"<run {i}>"),
    "backwards": _id(lambda i: i[::-1] if i[::-1] != i else f"{i}{i}"),
    "half a name": _id(lambda i: i[: max(1, len(i) // 2)]),
    "a list of a name": _id(lambda i: [i]),
    "upper case": _id(str.upper),
    "unknown": _id(lambda i: "unknown"),
    "places": lambda e, r: [{**one, "id": str(n)} for n, one in enumerate(e, 1)],
    "numbers": lambda e, r: [{**one, "id": n} for n, one in enumerate(e, 1)],
    "no score": lambda e, r: [{k: v for k, v in e[0].items() if k != "score"}, *e[1:]],
    "no id": lambda e, r: [{k: v for k, v in e[0].items() if k != "id"}, *e[1:]],
    "two names": lambda e, r: [{**e[0], "id": f"{e[0]['id']}, {e[1]['id']}"}, *e[2:]],
    "a tie of names": lambda e, r: [{**e[0], "id": [one["id"] for one in e]}],
    "Score": _renamed("score", "Score"),
    "score with a space": _renamed("score", "score "),
    "rating": _renamed("score", "rating"),
    "run": _renamed("id", "run"),
    "pairs": lambda e, r: [{"id": [one["id"], one["score"]]} for one in e],
    "nested entries": lambda e, r: [{"entry": one} for one in e],
    "a null among them": lambda e, r: [*e, None],  # type: ignore[list-item]
    "an empty one among them": lambda e, r: [e[0], {}, *e[1:]],
    "all but one": lambda e, r: e[1:],
    "an empty list": lambda e, r: [],
    "one for all": lambda e, r: [{"id": "all", "explanation": "", "score": 0.5}],
    "an average, too": lambda e, r: [*e, {"id": "mean", "explanation": "", "score": 0.5}],
    "twice": lambda e, r: [*e, r.choice(e)],
    "in the place of another": lambda e, r: [*e[:-1], e[0]],
    "twice, and differently": lambda e, r: [*e, {**e[-1], "score": e[-1]["score"] / 2}],
}


def _python(entries: Entries) -> str:
    return repr({"scores": entries})


def _yaml(entries: Entries) -> str:
    lines = [f"- id: {one.get('id')}\n  score: {one.get('score')}" for one in filter(None, entries)]
    return "scores:\n" + "\n".join(lines)


def _table(entries: Entries) -> str:
    rows = [f"| {one.get('id')} | {one.get('score')} |" for one in filter(None, entries)]
    return "\n".join(["| id | score |", "|---|---|", *rows])


def _xml(entries: Entries) -> str:
    rows = [f"<run id={one.get('id')!r}>{one.get('score')}</run>" for one in filter(None, entries)]
    return f"<scores>{''.join(rows)}</scores>"


def _json(entries: Entries, **options: Any) -> str:
    return json.dumps({"scores": entries}, **options)


def _cut(text: str, chance: random.Random) -> str:
    return text[: chance.randrange(len(text) - 1)]


#: How a verdict is written, and whether it can be read: True, False (perhaps), None (not at all).
FORMS: dict[str, Callable[[Entries, random.Random], tuple[str, bool | None]]] = {
    "JSON": lambda e, r: (_json(e), True),
    "JSON in lines": lambda e, r: (_json(e, indent=r.choice([1, 4, "\t"])), True),
    "JSON with CRLF": lambda e, r: (_json(e, indent=2).replace("\n", "\r\n"), True),
    "JSON without spaces": lambda e, r: (_json(e, separators=(",", ":")), True),
    "JSON in another order": lambda e, r: (_json(r.sample(e, len(e))), True),
    "JSON in escapes": lambda e, r: (_json(e).replace('"id"', '"\\u0069d"'), True),
    "a list": lambda e, r: (json.dumps(e), True),
    "JSON behind a mark": lambda e, r: ("\ufeff" + _json(e), True),
    "JSON twice": lambda e, r: (f"{_json(e)}\n{_json(r.sample(e, len(e)))}", True),
    "among fields": lambda e, r: (json.dumps({"notes": ["x"], "scores": e, "best": "x"}), True),
    "JSON in JSON": lambda e, r: (json.dumps(_json(e)), False),
    "in another object": lambda e, r: (json.dumps({"result": {"scores": e}}), False),
    "in a list": lambda e, r: (json.dumps([{"scores": e}]), False),
    "in lists": lambda e, r: (json.dumps([e]), False),
    "scores in capitals": lambda e, r: (json.dumps({"Scores": e}), False),
    "entry by entry": lambda e, r: ("\n".join(map(json.dumps, e)), False),
    "half and half": lambda e, r: (
        _json(e[: max(1, len(e) // 2)]) + _json(e[max(1, len(e) // 2) :] or e[:0]),
        False,
    ),
    "Python": lambda e, r: (_python(e), None),
    "a comma too many": lambda e, r: (_json(e).replace("]", ",]"), False),
    "comments": lambda e, r: (_json(e).replace("[", "[ // the runs\n", 1), False),
    "bare keys": lambda e, r: (_json(e).replace('"scores"', "scores"), False),
    "by name": lambda e, r: (
        json.dumps({"scores": {str(one.get("id")): one.get("score") for one in filter(None, e)}}),
        False,
    ),
    "a draft": lambda e, r: (json.dumps({"draft": {"scores": e}}), None),
    "a draft in what is cut off": lambda e, r: (
        f'{{"draft": {_json(e)}, "final": {{"scores": [',
        None,
    ),
    "a draft in what is broken": lambda e, r: (f'{{"draft": {_json(e)}, final: 1}}', None),
    "a word among them": lambda e, r: (_json([*e, "done"]), None),  # type: ignore[list-item]
    "a key twice": lambda e, r: (_json(e).replace('"expl', '"id": "x", "expl', 1), None),
    "scores twice": lambda e, r: (
        f'{{"scores": {json.dumps(e[::-1])}, "scores": {json.dumps(e)}}}',
        None,
    ),
    "thoughts": lambda e, r: (f"<think>{_json(e)}</think> They are all fine.", None),
    "words": lambda e, r: (
        " ".join(f"Run {one.get('id')} gets {one.get('score')}." for one in filter(None, e)),
        None,
    ),
    "a refusal": lambda e, r: ("I cannot judge this.", None),
    "nothing": lambda e, r: ("", None),
    "deep": lambda e, r: ("[" * 100_000, None),
    "many": lambda e, r: ("{} " * 5_000, None),
    "YAML": lambda e, r: (_yaml(e), None),
    "a table": lambda e, r: (_table(e), None),
    "XML": lambda e, r: (_xml(e), None),
    "base64": lambda e, r: (base64.b64encode(_json(e).encode()).decode(), None),
    "cut off": lambda e, r: (_cut(_json(e), r), None),
    "cut off in lines": lambda e, r: (_cut(_json(e, indent=2), r), None),
}


def _other(entries: Entries, chance: random.Random) -> Entries:
    """Another verdict on the same runs."""
    other = _copy(entries)
    one = chance.choice(other)
    one["score"] = (one["score"] + chance.uniform(0.05, 0.9)) % 1.0
    return other


def _by_run(entries: Entries) -> dict[str, float]:
    return {one["id"]: one["score"] for one in entries}


def _beside(key: str, other: Callable[[Entries], Any], *, first: bool = False) -> Any:
    """An object with the verdict and another one, under `key`."""

    def place(written: str, entries: Entries, chance: random.Random) -> tuple[Any, Entries]:
        another = _other(entries, chance)
        more = {key: other(another)}
        both = {**more, "scores": entries} if first else {"scores": entries, **more}
        return json.dumps(both), another

    return place


def _message(text: str, **fields: Any) -> AIMessage:
    return AIMessage(text, **fields)


def _called(entries: Entries) -> dict[str, Any]:
    return {"name": "Verdict", "args": {"scores": entries}, "id": "1"}


def _split(written: str, entries: Entries, chance: random.Random) -> tuple[Any, None]:
    at = chance.randrange(len(written) + 1)
    blocks = [{"type": "text", "text": part} for part in (written[:at], written[at:])]
    return AIMessage(blocks), None  # type: ignore[arg-type]


def _next_to(
    made: Callable[[str, Entries], Any],
) -> Callable[[str, Entries, random.Random], tuple[Any, Entries]]:
    def place(written: str, entries: Entries, chance: random.Random) -> tuple[Any, Entries]:
        another = _other(entries, chance)
        return made(written, another), another

    return place


def _corrected(written: str, entries: Entries, chance: random.Random) -> tuple[Any, Entries]:
    one = entries[-1] | {"score": (entries[-1]["score"] + 0.5) % 1}
    return json.dumps({"scores": entries, "correction": one}), [*entries[:-1], one]


Place = Callable[[str, Entries, random.Random], tuple[Any, Entries | None]]
#: What stands around a verdict, and the other verdict there.
PLACES: dict[str, Place] = {
    "alone": lambda w, e, r: (w, None),
    "in a fence": lambda w, e, r: (f"```json\n{w}\n```", None),
    "in a fence that does not end": lambda w, e, r: (f"```\n{w}", None),
    "behind words": lambda w, e, r: (f"Run {e[0]['id']} beats {e[-1]['id']}.\n{w}", None),
    "before words": lambda w, e, r: (f"{w}\nI stand by {e[0]['id']}: {e[0]['score']}.", None),
    "between words": lambda w, e, r: (f"{{The best}} [1] is. {w} I hope it helps.", None),
    "before an object": lambda w, e, r: (f'{w} {{"comment": 1}}', None),
    "behind a broken one": lambda w, e, r: (f"{_json([e[0] | {'score': 9}, *e[1:]])}{w}", e),
    "behind thoughts": lambda w, e, r: (f"<think>{_json(_other(e, r))}</think>{w}", None),
    "behind reasoning": lambda w, e, r: (
        AIMessage(
            [{"type": "reasoning", "reasoning": _json(_other(e, r))}, {"type": "text", "text": w}]  # type: ignore[arg-type]
        ),
        None,
    ),
    "in two blocks": _split,
    "behind a fake": lambda w, e, r: (f"{_json([{'id': '1', 'score': 1.0}])} is bait.\n{w}", None),
    "twice": lambda w, e, r: (f"{w}\n{w}", None),
    "before another": _next_to(lambda w, o: f"{w}\n{_json(o)}"),
    "behind another": _next_to(lambda w, o: f"{_json(o)}\n{w}"),
    "before another in a list": _next_to(lambda w, o: f"{w}\n{json.dumps(o)}"),
    "before the end of another": _next_to(lambda w, o: f'{w}\n{{"scores": [{json.dumps(o[0])}, '),
    "final_scores beside": _beside("final_scores", lambda o: o),
    "draft beside": _beside("draft", lambda o: o, first=True),
    "revised beside": _beside("revised", lambda o: {"scores": o}),
    "by name beside": _beside("final", _by_run),
    "deep beside": _beside("meta", lambda o: [{"rounds": [{"verdict": {"scores": o}}]}]),
    "one beside": _corrected,
    "with a call that differs": lambda w, e, r: (
        AIMessage(w, tool_calls=[_called(e), _called(other := _other(e, r))]),
        other,
    ),
    "with a call cut off": lambda w, e, r: (
        AIMessage(
            w,
            invalid_tool_calls=[
                {"name": "Verdict", "args": _cut(_json(e), r), "id": "1", "error": "x"}
            ],
        ),
        e,
    ),
}
#: Places with a whole verdict of its own before or behind the written one.
ANOTHER = ("before another", "behind another", "before another in a list")
TRANSPARENT = (
    "alone", "in a fence", "in a fence that does not end", "behind words", "between words",
    "before an object", "behind thoughts", "behind reasoning", "in two blocks", "behind a fake",
    "twice",
)  # fmt: skip
#: Damages that leave no run, and forms in which nobody would look for one.
NOBODY = ("an empty list", "one for all", "places", "numbers")
UNSEEN = ("a table", "base64", "thoughts", "words")
