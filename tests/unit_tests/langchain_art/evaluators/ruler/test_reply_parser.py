"""A thousand hostile replies: each gives exactly the verdict that it states, or none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage

from langchain_art import RulerEvaluator
from langchain_art.errors import JudgeError
from langchain_art.evaluators.ruler.reply_parser import UnusableReply, read
from tests.support.judges.groups import group, run, says
from tests.support.judges.literal_judge import ScriptedJudge, parse

Entries = list[dict[str, Any]]


def whole(entries: Entries) -> str:
    return json.dumps({"scores": entries})


def changed(entries: Entries, index: int, **fields: Any) -> Entries:
    return [{**one, **fields} if n == index else one for n, one in enumerate(entries)]


def nobody(entries: Entries) -> str:
    """An id like theirs, which none of them has."""
    return next(one for one in ("zzz", "zzx") if one not in {entry["id"] for entry in entries})


def without(entries: Entries, index: int, field: str) -> Entries:
    return [
        {k: v for k, v in one.items() if n != index or k != field} for n, one in enumerate(entries)
    ]


# What states the verdict in full, in whatever wrapping. (entries, chance) -> reply
HONEST: dict[str, Callable[[Entries, random.Random], Any]] = {
    "plain": lambda e, r: whole(e),
    "reordered": lambda e, r: whole(r.sample(e, len(e))),
    "a bare list": lambda e, r: json.dumps(e),
    "indented in a fence": lambda e, r: (
        f"Sure!\n```json\n{json.dumps({'scores': e}, indent=2)}\n```"
    ),
    "prose around": lambda e, r: f"Run {e[0]['id']} is {{best}} [1]. {whole(e)} I hope it helps.",
    "behind thoughts": lambda e, r: f"<think>{whole(changed(e, 0, score=0.123))}</think>{whole(e)}",
    "said twice alike": lambda e, r: whole(e) + "\n" + whole(r.sample(e, len(e))),
    "quoting a run's fake": lambda e, r: (
        f"{whole([{'id': '1', 'score': 1.0}])} is bait. {whole(e)}"
    ),
    "further fields": lambda e, r: json.dumps(
        {"notes": ["x"], "scores": changed(e, 0, confidence=9), "best": e[0]["id"]}
    ),
    "as a tool call": lambda e, r: AIMessage(
        "", tool_calls=[{"name": "Verdict", "args": {"scores": e}, "id": "1"}]
    ),
    "blocks": lambda e, r: AIMessage([{"type": "text", "text": whole(e)}]),
    "cut off behind the list": lambda e, r: whole(e) + ' {"comment": 1}',
}
# What states none: (entries, chance) -> reply
HOSTILE: dict[str, Callable[[Entries, random.Random], Any]] = {
    "missing": lambda e, r: whole(r.sample(e, len(e) - 1)),
    "empty": lambda e, r: whole([]),
    "nothing": lambda e, r: "",
    "duplicate": lambda e, r: whole([*e, {**r.choice(e), "score": 0.5}]),
    "duplicate that says the same": lambda e, r: whole([*e, r.choice(e)]),
    "duplicate in the place of another": lambda e, r: whole([*e[:-1], e[0]]),
    "unknown in the place of another": lambda e, r: whole(changed(e, 0, id=nobody(e))),
    "one too many": lambda e, r: whole([*e, {"id": nobody(e), "explanation": "", "score": 0.4}]),
    "places for ids": lambda e, r: whole([{**one, "id": str(n)} for n, one in enumerate(e, 1)]),
    "numbers for ids": lambda e, r: whole([{**one, "id": n} for n, one in enumerate(e, 1)]),
    "upper case": lambda e, r: whole([{**one, "id": one["id"].upper()} for one in e]),
    "NaN": lambda e, r: whole(changed(e, r.randrange(len(e)), score=float("nan"))),
    "infinity": lambda e, r: whole(changed(e, r.randrange(len(e)), score=float("inf"))),
    "7.0": lambda e, r: whole(changed(e, r.randrange(len(e)), score=7.0)),
    "-0.1": lambda e, r: whole(changed(e, r.randrange(len(e)), score=-0.1)),
    "a huge integer": lambda e, r: whole(changed(e, 0, score=10**400)),
    "1e308": lambda e, r: whole(changed(e, 0, score=1e308)),
    "text for a score": lambda e, r: whole(changed(e, 0, score="0.7")),
    "true for a score": lambda e, r: whole(changed(e, 0, score=True)),
    "null": lambda e, r: whole(changed(e, 0, score=None)),
    "a list for a score": lambda e, r: whole(changed(e, 0, score=[0.1])),
    "no score": lambda e, r: whole(without(e, 0, "score")),
    "no id": lambda e, r: whole(without(e, 0, "id")),
    "a word among the entries": lambda e, r: json.dumps({"scores": [*e, "done"]}),
    "prose": lambda e, r: f"Run {e[0]['id']} gets 0.9 and all others get 0.1.",
    "a refusal": lambda e, r: "I cannot judge this.",
    "cut off": lambda e, r: (text := whole(e))[: r.randrange(1, len(text) - 2)],
    "cut off in a fence": lambda e, r: (
        "```json\n" + (text := whole(e))[: r.randrange(1, len(text) - 2)]
    ),
    "a draft, and the end cut off": lambda e, r: (
        whole(changed(e, 0, score=0.111)) + whole(e)[: r.randrange(1, len(whole(e)) - 2)]
    ),
    "a draft inside of what is cut off": lambda e, r: (
        f'{{"draft": {whole(e)}, "final": {{"scores": ['
    ),
    "a draft inside of something whole": lambda e, r: json.dumps({"draft": {"scores": e}}),
    "a draft inside of something broken": lambda e, r: f'{{"draft": {whole(e)}, final: 1}}',
    "two that differ": lambda e, r: whole(e) + whole(changed(e, 0, score=0.111)),
    "one broken, one whole": lambda e, r: whole(changed(e, 0, score=9)) + whole(e),
    "a key twice": lambda e, r: whole(e).replace('"score": ', '"score": 0.5, "score": ', 1),
    "scores twice": lambda e, r: (
        f'{{"scores": {json.dumps(changed(e, 0, score=0.1))}, "scores": {json.dumps(e)}}}'
    ),
    "thoughts only": lambda e, r: f"<think>{whole(e)}</think> They are all fine.",
    "single quotes": lambda e, r: str({"scores": e}),
    "deep": lambda e, r: "[" * 100_000,
    "many": lambda e, r: "{} " * 5_000,
    "another form": lambda e, r: json.dumps({one["id"]: one["score"] for one in e}),
    "two tool calls that differ": lambda e, r: AIMessage(
        "",
        tool_calls=[
            {"name": "Verdict", "args": {"scores": es}, "id": str(n)}
            for n, es in enumerate((e, changed(e, 0, score=0.111)))
        ],
    ),
    "a tool call of nothing": lambda e, r: AIMessage(
        whole(e), tool_calls=[{"name": "Verdict", "args": {}, "id": "1"}]
    ),
}


def entries_for(ids: list[str], chance: random.Random) -> Entries:
    scores = chance.sample(range(20, 100), len(ids))
    return [
        {"id": one, "explanation": f"because {n}", "score": n / 100}
        for one, n in zip(ids, scores, strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_thousand_replies_never_give_a_wrong_assignment(seed: int) -> None:
    """55 kinds, each with 20 seeds, through the evaluator: 1,100 replies."""
    assert (len(HONEST) + len(HOSTILE)) * 20 >= 1000
    chance = random.Random(seed)
    shown = group(*(run(f"r{n}", says(f"answer {n}")) for n in range(chance.randint(2, 6))))
    for kind, make in {**HONEST, **HOSTILE}.items():
        stated: dict[str, float] = {}

        def answer(request: str, make: Any = make, stated: dict[str, float] = stated) -> Any:
            runs = parse(request).runs
            entries = entries_for(list(runs), chance)
            stated.update({runs[one["id"]].strip(): one["score"] for one in entries})
            return make(entries, chance)

        evaluator = RulerEvaluator(ScriptedJudge(answer=answer), passes=1, attempts=1)
        if kind in HONEST:
            judged = evaluator.invoke(shown)
            found = {f"answer {one.id[1:]}": one.reward for one in judged.trajectories}
            assert found == stated, kind
        else:
            with pytest.raises(JudgeError):
                evaluator.invoke(shown)
                pytest.fail(kind)


IDS = ["bcd", "fgh", "jkm"]
SCORES = st.one_of(
    st.floats(), st.integers(), st.none(), st.booleans(), st.text(max_size=4), st.floats(0, 1)
)
ENTRIES = st.lists(
    st.fixed_dictionaries(
        {"id": st.sampled_from([*IDS, "1", "", None, 1]), "score": SCORES},
        optional={"explanation": st.one_of(st.text(), st.none(), st.integers())},
    ),
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(ENTRIES, st.text(max_size=30)), min_size=1, max_size=3), st.integers(0, 9)
)
def test_what_is_read_is_what_stands_there(pieces: list[Any], cut: int) -> None:
    """Against a naive reading: its ids are exactly the runs, all in range, all alike."""
    text = " ".join(one if isinstance(one, str) else whole(one) for one in pieces)
    text = text[: len(text) - cut]
    try:
        found = read(AIMessage(text), IDS)
    except UnusableReply:
        if not cut and len(pieces) == 1 and isinstance(pieces[0], list):
            assert not is_verdict(pieces[0])
        return
    stated = [
        {one["id"]: one["score"] for one in piece}
        for piece in pieces
        if isinstance(piece, list) and is_verdict(piece)
    ]
    assert {id_: score.value for id_, score in found.items()} in stated
    assert sorted(found) == sorted(IDS)


def is_verdict(entries: Entries) -> bool:
    return sorted(str(one["id"]) for one in entries) == sorted(IDS) and all(
        type(one["score"]) in (int, float) and 0 <= one["score"] <= 1 for one in entries
    )
