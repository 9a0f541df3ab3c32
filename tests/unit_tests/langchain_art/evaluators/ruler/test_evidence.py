"""What a careful reader finds in the request is what the runs did: nothing is lost or misplaced."""

import json
import random
import re
from typing import Any

import pytest

from langchain_art import RulerEvaluator, Trajectory, TrajectoryGroup, Turn
from langchain_art.wire import Message
from tests.support.judges.literal_judge import ScriptedJudge, asked_ids, verdict

RUNS, MAILS = 8, 14
_WORDS = """
about after agenda answer before board budget call change client contract date deadline delay
details draft estimate figures follow group hotel invoice item later letter market meeting memo next
note number office order paper partner people phone plan price product proposal question report
review room sales schedule send server site staff status support table team terms ticket travel
"""
WORDS = tuple(_WORDS.split())

Runs = list[list[Message]]


def sentence(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(8, 16))).capitalize() + "."


def case(number: int) -> tuple[str, Runs]:
    """A fact that one mail of fourteen has, and runs that read two to eight of them and answer."""
    chance = random.Random(f"case {number}")
    name, fact = f"Falcon-{number}", f"{chance.randint(1, 28)} March"
    mails: dict[str, str] = {}
    for mail in range(MAILS):
        lines = [sentence(chance) for _ in range(chance.randint(12, 40))]
        if mail == 0:
            lines.insert(chance.randrange(1, len(lines)), f"We begin {name} on {fact}, as agreed.")
        mails[f"<{mail:02}@mail.example>"] = "\n".join(lines)
    runs: Runs = []
    for run in range(RUNS):
        runs.append([{"role": "user", "content": f"On which day does {name} begin?"}])
        for step in range(chance.randint(2, 8)):
            mail = chance.choice([*list(mails)[:1] * 3, *mails])
            function = {"name": "read_email", "arguments": json.dumps({"id": mail})}
            call = {"id": f"c{run}-{step}", "type": "function", "function": function}
            runs[-1] += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": f"{mail}\n{mails[mail]}"},
            ]
        day = fact if chance.random() < 0.6 else f"{chance.randint(1, 28)} May"
        said = f"Project {name} begins on {day}. {sentence(chance)} {run}"
        runs[-1].append({"role": "assistant", "content": said})
    return fact, runs


def trajectory(number: int, messages: list[Message]) -> Trajectory:
    turns: list[Turn] = []
    for at in range(1, len(messages), 2):
        extends = len(turns) - 1 if turns else None
        turns.append(Turn(extends=extends, messages=(messages[at - 1],), reply=messages[at]))
    return Trajectory(id=f"r{number}", turns=tuple(turns))


def read(runs: Runs, **options: int) -> dict[str, dict[str, list[str]]]:
    """By a run's answer, its texts by kind, as they stand in the request that a judge gets."""
    model = ScriptedJudge(answer=lambda request: verdict(dict.fromkeys(asked_ids(request), 0.5)))
    group = TrajectoryGroup(id="g", trajectories=[trajectory(n, one) for n, one in enumerate(runs)])
    RulerEvaluator(model, passes=1, **options).invoke(group)
    return {texts["assistant"][-1]: texts for texts in parts(model.requests[0])}


def parts(prompt: str) -> list[dict[str, list[str]]]:
    """The runs of a prompt, with the parts that they follow and the notes put back."""
    mark = prompt.split("\n", 1)[0].split()[1]
    prompt = re.sub(rf"<{mark} cut \d+>\n", "", prompt)
    pieces = re.findall(rf"<{mark} ([^>]*)> ?(.*?)(?=\n?<{mark} |\Z)", prompt, re.S)
    notes, places, runs = dict[str, str](), dict[str, list[tuple[str, str]]](), list[str]()
    current: list[tuple[str, str]] = []
    for tag, text in pieces:
        kind, *more = tag.split()
        if kind == "note":
            notes[more[0]] = text
        elif kind in ("part", "run"):
            current = places[more[0]] = [*places[more[2]]] if more[1:2] == ["follows"] else []
            runs += [more[0]] if kind == "run" else []
        elif kind not in ("task", "tools", "end"):
            current.append((kind, notes[more[1]] if more[:1] == ["="] else text))
    found: list[dict[str, list[str]]] = []
    for run in runs:
        found.append({})
        for kind, text in places[run]:
            found[-1].setdefault(kind, []).append(text)
    return found


def told(messages: list[Message], role: str) -> list[Any]:
    return [one["content"].replace("<", "&lt;") for one in messages if one["role"] == role]


@pytest.mark.parametrize("number", range(10))
def test_runs_of_several_turns_can_be_put_together_again(number: int) -> None:
    _, runs = case(number)
    found = read(runs, output_tokens=100_000)
    for messages in runs:
        one = found[messages[-1]["content"]]
        calls = [call["function"] for m in messages for call in m.get("tool_calls", ())]
        written = [f"{call['name']} {call['arguments']}".replace("<", "&lt;") for call in calls]
        assert (one["call"], one["result"]) == (written, told(messages, "tool"))


def test_shortening_keeps_what_decides() -> None:
    """At the default cap at most one run in a hundred loses the line that bears its answer out."""
    lost = had = 0
    for number in range(25):
        fact, runs = case(number)
        found = read(runs)
        for messages in runs:
            grounded = fact in "".join(told(messages, "tool"))
            kept = fact in "".join(found[messages[-1]["content"]]["result"])
            lost, had = lost + (grounded and not kept), had + grounded
    assert lost <= 2 and had > 100
