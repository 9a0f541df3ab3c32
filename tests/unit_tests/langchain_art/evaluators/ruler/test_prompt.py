"""What the judge is shown: transcripts, shared parts, shortened texts; against naive readings."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_art import RulerEvaluator
from langchain_art.errors import JudgeError
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
    head = (SYSTEM, ASK)
    turns = (
        Turn(node="plan", path=("team", "plan"), messages=head, reply=says("plan")),
        Turn(node="left", extends=0, messages=({"role": "user", "content": "L"},), reply=says("l")),
        Turn(
            node="right", extends=0, messages=({"role": "user", "content": "R"},), reply=says("r")
        ),
        Turn(node="plan", path=("team", "plan"), messages=(SYSTEM, says("l")), reply=says("end")),
    )
    assert kinds(Trajectory(id="a", turns=turns), labelled=True) == [
        ("node", "team/plan"),
        ("system", "You are an agent."),
        ("user", "When?"),
        ("assistant", "plan"),
        ("node", "left"),
        ("user", "L"),
        ("assistant", "l"),
        ("node", "right"),
        ("again", "3"),
        ("user", "R"),
        ("assistant", "r"),
        ("node", "team/plan"),
        ("again", "2"),
        ("assistant", "end"),
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
    drafts = {"role": "assistant", "content": "Sure! Monday", "tool_calls": [call("look")]}
    edit = {"role": "assistant", "content": "Monday", "tool_calls": [call("peek")]}
    found, more = tool("found"), {"role": "user", "content": "And?"}
    end, cut = says("Sure! Friday"), says("Friday")
    turns = (
        Turn(messages=(ASK,), reply=drafts, edited=edit),
        Turn(messages=(ASK, edit, found), reply=says("ok")),
        Turn(extends=1, messages=(edit, more), reply=end, edited=cut),
    )
    expected = [
        ("user", "When?"),
        ("assistant", "Sure! Monday"),
        ("call", "look {}"),
        ("again", "2"),
        ("result", "found"),
        ("assistant", "ok"),
        ("assistant", "Sure! Monday"),
        ("call", "look {}"),
        ("user", "And?"),
        ("assistant", "Sure! Friday"),
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


@pytest.mark.parametrize(
    ("size", "expected"), [(10_000, "outputs"), (3_000, "less"), (520, "texts")]
)
def test_caps_fall_until_all_fits(size: int, expected: str) -> None:
    outputs = [Block("result", "x y z\n" * 2000, is_output=True) for _ in range(10)]
    texts = [Block("user", "a b c\n" * 400) for _ in range(1)]
    caps = fitting([*outputs, *texts], 240, size)
    shown = [shortened(block, caps, set()) for block in (*outputs, *texts)]
    said = sum(tokens("".join(p for p in one if isinstance(p, str))) for one in shown)
    assert said <= size
    found = {
        "outputs": caps == Caps(240),
        "less": caps.outputs < 240 and caps.texts is None,
        "texts": caps.outputs <= 40 and caps.texts is not None,
    }
    assert found[expected], caps


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
