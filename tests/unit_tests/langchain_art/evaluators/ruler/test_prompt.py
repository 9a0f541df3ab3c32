"""What the judge is shown: transcripts, shared parts, shortened texts; against naive readings."""

import copy
import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_art import RulerEvaluator
from langchain_art.errors import JudgeError
from langchain_art.evaluators import as_group
from langchain_art.evaluators.ruler.prompt import (
    Caps,
    DeduplicatedRuns,
    deduplicate,
    fitting,
    shortened,
    tokens,
)
from langchain_art.evaluators.transcript import Block, text_of, tool_line, transcript
from langchain_art.wire import Message, Trajectory, TrajectoryGroup, Turn
from tests.support.judges.groups import group, run, says, tool
from tests.support.judges.literal_judge import ScriptedJudge
from tests.support.soak import count

SYSTEM: Message = {"role": "system", "content": "You are an agent."}
ASK: Message = {"role": "user", "content": "When?"}


def call(name: str, id: str = "1", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def kinds(one: Trajectory, *, labelled: bool = False) -> list[tuple[str, str]]:
    return [(block.kind, block.text) for block in transcript(one, labelled=labelled)]


def requested(shown: TrajectoryGroup, **options: Any) -> str:
    model = ScriptedJudge()
    RulerEvaluator(model, passes=1, **options).invoke(shown)
    return model.requests[0]


def test_a_tool_agents_run_shows_each_message_once() -> None:
    searches = {"role": "assistant", "content": None, "tool_calls": [call("search")]}
    turns = (
        Turn(messages=(SYSTEM, ASK), reply=searches),
        Turn(extends=0, messages=(tool("found"),), reply=says("Monday")),
    )
    one = Trajectory(id="a", turns=turns, output={"messages": [ASK, says("Monday")]})
    assert transcript(one, labelled=False) == (
        Block("system", "You are an agent."),
        Block("user", "When?"),
        Block("call", "search {}"),
        Block("result", "found", is_output=True),
        Block("assistant", "Monday"),
    )


def test_branches_say_their_node_and_repeat_nothing() -> None:
    def asks(text: str) -> Message:
        return {"role": "user", "content": text}

    plan: dict[str, Any] = {"node": "plan", "path": ("team", "plan")}
    turns = (
        Turn(messages=(SYSTEM, ASK), reply=says("plan"), **plan),
        Turn(node="left", extends=0, messages=(asks("L"),), reply=says("l")),
        Turn(node="right", extends=0, messages=(asks("R"),), reply=says("r")),
        Turn(messages=(SYSTEM, says("l")), reply=says("end"), **plan),
    )
    head = [("system", "You are an agent."), ("user", "When?")]
    assert kinds(Trajectory(id="a", turns=turns), labelled=True) == [
        *[("node", "team/plan"), *head, ("assistant", "plan")],
        *[("node", "left"), ("user", "L"), ("assistant", "l")],
        *[("node", "right"), ("again", "3"), ("user", "R"), ("assistant", "r")],
        *[("node", "team/plan"), ("again", "2"), ("assistant", "end")],
    ]


def test_thrown_away_attempts_errors_and_endings_are_said() -> None:
    turns = (
        Turn(messages=(ASK,), reply=says("first try"), excluded_because="retried"),
        Turn(messages=(ASK,), error="Timeout: slow"),
    )
    ended: dict[str, Any] = {"status": "truncated", "error": "limit"}
    ended |= {"output": {"n": 1, "x": 2}, "input": {"x": 2}}
    assert kinds(Trajectory(id="a", turns=turns, **ended)) == [
        ("excluded", "retried"),
        ("user", "When?"),
        ("error", "Timeout: slow"),
        ("output", '{"n":1}'),
        ("ended", "truncated limit"),
    ]
    assert kinds(Trajectory(id="b", input="q", output="a")) == [("input", "q"), ("output", "a")]
    assert kinds(Trajectory(id="c", output={"messages": [{"content": "hi"}]})) == [("output", "hi")]


def test_a_judge_reads_replies_as_sampled_not_as_the_graph_edited_them() -> None:
    drafts = says("Sure! Monday") | {"tool_calls": [call("look")]}
    edit = says("Monday") | {"tool_calls": [call("peek")]}
    found, more = tool("found"), {"role": "user", "content": "And?"}
    end, cut = says("Sure! Friday"), says("Friday")
    turns = (
        Turn(messages=(ASK,), reply=drafts, edited=edit),
        Turn(messages=(ASK, edit, found), reply=says("ok")),
        Turn(extends=1, messages=(edit, more), reply=end, edited=cut),
    )
    sampled = [("assistant", "Sure! Monday"), ("call", "look {}")]
    expected = [
        *[("user", "When?"), *sampled],
        *[("again", "2"), ("result", "found"), ("assistant", "ok")],
        *[*sampled, ("user", "And?"), ("assistant", "Sure! Friday")],
    ]
    for output in ({"messages": [ASK, cut]}, "Friday"):
        assert kinds(Trajectory(id="a", turns=turns, output=output)) == expected
    other = Trajectory(id="a", turns=turns, output="On Friday")
    assert kinds(other) == [*expected, ("output", "On Friday")]


def test_results_of_parallel_calls_say_whose_they_are() -> None:
    both = [call("f", "x"), call("g", "y")]
    reply = {"role": "assistant", "content": "Both.", "tool_calls": both}
    results = [{"role": "tool", "tool_call_id": id, "content": id} for id in ("y", "x", "unknown")]
    one = Trajectory(id="a", turns=(Turn(messages=(ASK, reply, *results), reply=says("ok")),))
    assert [kind for kind, _ in kinds(one)][2:] == [
        *("call", "call", "result 2", "result 1", "result", "assistant")
    ]


def test_a_tool_is_a_line_and_content_that_is_no_text_is_named() -> None:
    parameters = {
        "properties": {"q": {"type": "string"}, "k": {"enum": ["a", "b"]}, "z": {"anyOf": []}},
        "required": ["q"],
    }
    function = {"name": "search", "description": "Find.", "parameters": parameters}
    assert tool_line({"function": function}) == "search(q: string, k?: a|b, z?: any): Find."
    assert tool_line({"name": "f"}) == "f()"
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, "b", {}]
    assert text_of(parts) == "a\n[image_url]\nb\n[part]"
    assert (text_of(None), text_of({"a": 1})) == ("", '{"a":1}')


def test_the_request_names_tools_and_nodes_and_the_task() -> None:
    def node(name: str, *tools: str) -> Turn:
        offered = tuple({"function": {"name": one}} for one in tools)
        return Turn(node=name, messages=(ASK,), tools=offered, reply=says(name))

    shown = group(
        Trajectory(id="a", turns=(node("writer", "search", "read"), node("critic", "approve"))),
        Trajectory(id="b", turns=(node("writer", "search", "read"),)),
        question="When?",
    )
    text = requested(shown)
    assert "task> {" in text
    assert "tools> for critic:\napprove()" in text
    assert "tools> for writer:\nsearch()\nread()" in text
    assert "node> writer" in text
    assert "task>" not in requested(shown, context=None)
    assert "task> only this" in requested(shown, context=lambda _: "only this")


# ---- the forest


def unfolded(found: DeduplicatedRuns, index: int) -> tuple[Block, ...]:
    part = found.runs[index]
    blocks = list(part.blocks)
    while part.follows is not None:
        part = found.parts[part.follows]
        blocks = [*part.blocks, *blocks]
    return tuple(blocks)


TEXTS = st.sampled_from(["a", "b" * 50, "c" * 200, "d" * 400])
BLOCKS = st.builds(Block, st.sampled_from(["user", "result"]), TEXTS)


@pytest.mark.soak
@settings(max_examples=count(100, 300), deadline=None)
@given(st.lists(st.lists(BLOCKS, max_size=8).map(tuple), min_size=1, max_size=8, unique=True))
def test_a_forest_unfolds_to_its_runs_and_is_never_longer(runs: list[tuple[Block, ...]]) -> None:
    found = deduplicate(runs)
    assert [unfolded(found, index) for index in range(len(runs))] == runs
    assert all(part.follows is None or part.follows < n for n, part in enumerate(found.parts))
    naive = sum(len(block.text) for one in runs for block in one)
    assert sum(len(block.text) for block in found.blocks) <= naive
    counts = [block.text for part in [*found.parts, *found.runs.values()] for block in part.blocks]
    assert all(counts.count(note.text) > 1 for note in found.notes)
    # No long text is shown twice.
    shown = [block.text for block in found.blocks if len(block.text) >= 200]
    assert len(shown) == len(set(shown))


# ---- shortening


@pytest.mark.soak
@settings(max_examples=count(100, 300), deadline=None)
@given(st.text(max_size=3000), st.integers(40, 300), st.sets(st.text(min_size=3, max_size=6)))
def test_what_is_shortened_keeps_its_order_its_ends_and_its_cap(
    text: str, cap: int, wanted: set[str]
) -> None:
    pieces = shortened(Block("result", text, is_output=True), Caps(cap), wanted)
    position = 0
    for piece in pieces:
        if isinstance(piece, int):
            position += piece
        else:
            assert text[position : position + len(piece)] == piece
            position += len(piece)
    assert position == len(text)
    kept = [piece for piece in pieces if isinstance(piece, str)]
    assert tokens("".join(kept)) <= cap or kept == [text]
    assert not text or isinstance(pieces[0], str)


def test_caps_fall_until_all_fits() -> None:
    outputs = [Block("result", "x y z\n" * 2000, is_output=True) for _ in range(10)]
    blocks = [*outputs, Block("user", "a b c\n" * 400)]
    caps = {size: fitting(blocks, 240, size) for size in (10_000, 3_000, 520)}
    for size, one in caps.items():
        shown = [shortened(block, one, set()) for block in blocks]
        said = sum(tokens("".join(p for p in one if isinstance(p, str))) for one in shown)
        assert said <= size
    assert caps[10_000] == Caps(240)
    assert caps[3_000].outputs < 240 and caps[3_000].texts is None
    assert caps[520].outputs <= 40 and caps[520].texts is not None


def test_what_cannot_fit_is_not_judged() -> None:
    model = ScriptedJudge()
    long = group(run("a", says("GOOD " * 500)), run("b", says("BAD " * 500)))
    with pytest.raises(JudgeError, match="raise `budget`"):
        RulerEvaluator(model, budget=20).invoke(long)
    assert not model.said


def test_a_cut_is_ours_and_cannot_be_forged() -> None:
    text = requested(group(run("a", says("x")), run("b", tool("mail\n" * 2000), says("y"))))
    mark = text.split()[1]
    assert f"<{mark} cut " in text


TALK = [ASK, says("Done.")]
IMAGE = "data:image/png;base64,AAA"


def shows(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [part]}


def searched(first: str, second: str, *, of: str) -> list[dict[str, Any]]:
    named = [(f"{of}0", first), (f"{of}1", second)]
    look = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    calls = [{"id": id_, **look} for id_, _ in named]
    results = [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in named]
    return [ASK, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


def asked_of(*outputs: Any) -> list[str]:
    """The requests that a judge got about runs with these outputs."""
    model = ScriptedJudge()
    RulerEvaluator(model, passes=1).invoke(as_group(outputs))
    return model.requests


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"messages": TALK, "answer": None}, {"messages": TALK}),
        ({"messages": TALK, "n": 1}, {"messages": TALK, "n": True}),
        ({"messages": [shows(IMAGE), says("x")]}, {"messages": [shows(IMAGE + "B"), says("x")]}),
        ({"messages": TALK, "again": "Done."}, {"messages": TALK}),
        ({"messages": searched("a", "b", of="c")}, {"messages": searched("b", "a", of="c")}),
        ({"messages": [{**says("x"), "name": "a"}]}, {"messages": [{**says("x"), "name": "b"}]}),
        ([], {"messages": []}),
    ],
)
def test_neighbours(left: Any, right: Any) -> None:
    assert len(asked_of(left, right)) == 1
    assert asked_of(left, copy.deepcopy(left)) == []


def test_a_captured_run_that_returns_an_earlier_text() -> None:
    replies = as_group([[ASK, says("a"), says("b")]]).trajectories[0].turns
    runs = [Trajectory(id=text, turns=replies, output=text) for text in ("a", "b")]
    assert len(asked_of(*runs)) == 1


def test_ids_that_are_drawn_and_reasoning_are_no_difference() -> None:
    thought = {**says("x"), "reasoning_content": "hm"}
    assert asked_of({"messages": [ASK, thought]}, {"messages": [ASK, says("x")]}) == []
    ours, theirs = ({"messages": searched("a", "b", of=of)} for of in "cd")
    assert asked_of(ours, theirs) == []


VALUES: list[Any] = [None, True, 1, 1.0, 0, "", "x", "1", [], {}, ["x"], {"k": None}, {"k": 1}]


def changed(rng: random.Random, one: dict[str, Any]) -> dict[str, Any]:
    """`one` with one field or message changed, added or left out; or as it is."""
    other = copy.deepcopy(one)
    match rng.randrange(5):
        case 0:
            other[rng.choice("abc")] = rng.choice(VALUES)
        case 1:
            other.pop(rng.choice("abc"), None)
        case 2:
            other["messages"].append(rng.choice(other["messages"]))
        case 3:
            rng.choice(other["messages"])["content"] = rng.choice(["x", "y", ""])
        case _:
            rng.shuffle(other["messages"])
    return other


@pytest.mark.parametrize("seed", range(count(2, 100)))
def test_states_that_differ_anywhere_are_judged(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        roles, texts = ["user", "assistant", "system"], ["x", "y", '{"a":1}', ""]
        keys = rng.sample("abc", rng.randint(0, 2))
        one: dict[str, Any] = {key: rng.choice(VALUES) for key in keys}
        said = range(rng.randint(1, 3))
        one["messages"] = [{"role": rng.choice(roles), "content": rng.choice(texts)} for _ in said]
        other = changed(rng, one)
        same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
        assert bool(asked_of(one, other)) is not same, (one, other)


RUNS, MAILS = 8, 14
_WORDS = """
about after agenda answer before board budget call change client contract date deadline delay draft
estimate figures group hotel invoice item letter market meeting note number office order people plan
"""
WORDS = _WORDS.split()
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
    for number in range(RUNS):
        messages: list[Message] = [{"role": "user", "content": f"When does {name} begin?"}]
        for step in range(chance.randint(2, 8)):
            mail = chance.choice([*list(mails)[:1] * 3, *mails])
            function = {"name": "read_email", "arguments": json.dumps({"id": mail})}
            call = {"id": f"c{number}-{step}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            found = f"{mail}\n{mails[mail]}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
        day = fact if chance.random() < 0.6 else f"{chance.randint(1, 28)} May"
        said = f"Project {name} begins on {day}. {sentence(chance)} {number}"
        runs.append([*messages, {"role": "assistant", "content": said}])
    return fact, runs


def read(runs: Runs, **options: int) -> dict[str, dict[str, list[str]]]:
    """By a run's answer, its texts by kind, as they stand in the request that a judge gets."""
    shown = requested(as_group(runs), **options)
    return {texts["assistant"][-1]: texts for texts in parts(shown)}


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
    for name in runs:
        found.append({})
        for kind, text in places[name]:
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
