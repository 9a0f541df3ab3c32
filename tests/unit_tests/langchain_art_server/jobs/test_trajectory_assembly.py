"""Tagged calls to a trajectory: what goes on with what, and which calls do not count."""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.errors import InvalidRequest
from langchain_art.wire import CallTags, Trajectory
from langchain_art_server.jobs.trajectory_assembly import assemble
from langchain_art_server.storage.tables import CallRecord
from tests.support.call_records import record
from tests.support.soak import count

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "When?"}


def said(text: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def at(
    second: float, call_id: str, messages: list[Message], text: str, **changes: Any
) -> CallRecord:
    """A call that begins at `second` and takes one; its tokens are those of a plain template."""
    tags = CallTags(trajectory_id="t-1", **changes.pop("tags", {}))
    request = {"messages": messages, **changes.pop("asked", {})}
    values: dict[str, Any] = {
        "created_at": second + 1.0,
        "began": int(second * 1000),
        "number": int(second * 1000) + 1000,
        "tags": tags,
        "request": request,
        "reply": said(text),
        "prompt": tokens_of(messages),
        "said": tokens_of([said(text)]),
    }
    return record(call_id, **(values | changes))


def tokens_of(messages: list[Message]) -> list[int]:
    return [ord(char) for m in messages for char in f"<{m['role']}>{m.get('content') or ''}</>"]


def excluded(trajectory: Trajectory) -> dict[str, str]:
    return {t.call_id or "": t.excluded_because for t in trajectory.turns if t.excluded_because}


def extends(trajectory: Trajectory) -> list[int | None]:
    return [turn.extends for turn in trajectory.turns]


def test_turns_stand_in_the_order_in_which_they_were_asked_for() -> None:
    calls = [
        at(5, "late", [USER, said("a"), USER], "b", tags={"step": 2, "scenario": "s"}),
        at(
            0, "first", [USER], "a", created_at=4.0, latency=4.0, tags={"tags": ("x",), "node": "n"}
        ),
        at(1, "beside", [USER, USER], "c"),
    ]
    run = assemble("t-1", calls)
    assert [turn.call_id for turn in run.turns] == ["first", "beside", "late"]
    assert extends(run) == [None, None, 0]
    assert (run.id, run.scenario, run.reward, run.status) == ("t-1", "s", None, "completed")
    first, late = run.turns[0], run.turns[2]
    assert (first.tags, first.node, first.started_at, first.latency) == (("x",), "n", 0.0, 4.0)
    assert first.usage is not None
    assert first.usage.prompt_tokens == len(tokens_of([USER])) and late.messages == (USER,)
    assert run.prompt(2) == [USER, said("a"), USER]


def test_a_prompt_goes_on_with_the_longest_that_it_begins_with() -> None:
    calls = [
        at(0, "a", [USER], "1"),
        at(2, "b", [USER, said("1"), USER], "2"),
        at(4, "c", [USER, said("1"), USER, said("2"), USER], "3"),
        at(6, "d", [USER, said("1"), USER, USER], "4"),
        at(8, "e", [USER, said("9"), USER], "5"),
    ]
    assert extends(assemble("t-1", calls)) == [None, 0, 1, 0, None]


CALL = {
    "id": "x1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"b": 1, "a": "é"}'},
}


def called(arguments: str, **more: Any) -> Message:
    function = {"name": "f", "arguments": arguments}
    return {**CALL, **more, "function": function}


@pytest.mark.parametrize("tokens_fit", [True, False])
def test_a_reply_that_comes_back_written_differently_is_known(tokens_fit: bool) -> None:
    first = at(0, "a", [USER], "", reply=said(None, tool_calls=[CALL]), said=[7, 8, 9])
    result = {"role": "tool", "tool_call_id": "x1", "content": "found"}
    prompt = [*first.prompt_token_ids, 7, 8, 9 if tokens_fit else 10, 1, 1]
    again = called('{"a":"\\u00e9","b":1}', index=0)
    for back in (
        {"role": "assistant", "tool_calls": [CALL]},
        said([], name="model", tool_calls=[CALL]),
        said("", refusal=None, function_call=None, annotations=[], tool_calls=[again]),
    ):
        second = at(2, "b", [USER, back, result], "done", prompt=prompt)
        run = assemble("t-1", [first, second])
        assert extends(run) == [None, 0] and run.turns[1].messages == (result,)
        assert run.prompt(1) == [USER, said(None, tool_calls=[CALL]), result]
    for other in (said(None, tool_calls=[called('{"b": 2, "a": "é"}')]), said("x")):
        second = at(2, "b", [USER, other], "done", prompt=[1, 2])
        assert extends(assemble("t-1", [first, second])) == [None, None]


def test_tokens_decide_before_messages() -> None:
    first = at(0, "a", [USER], " 1", said=[7, 8])
    prompt = [*first.prompt_token_ids, 7, 8, 9]
    trimmed = at(2, "b", [USER, said("1"), USER], "2", prompt=prompt)
    run = assemble("t-1", [first, trimmed])
    assert extends(run) == [None, 0] and run.turns[1].messages == (USER,)
    in_one = [{"role": "user", "content": "When?</><assistant> 1"}]  # no reply stands there
    run = assemble("t-1", [first, at(2, "b", in_one, "2", prompt=prompt)])
    assert extends(run) == [None, None] and run.prompt(1) == in_one


def test_text_in_parts_is_text() -> None:
    parts = [{"type": "text", "text": "wh"}, {"type": "text", "text": "en"}]
    first = at(0, "a", [{"role": "user", "content": "when"}], "1")
    second = at(
        2, "b", [{"role": "user", "content": parts}, said("1"), USER], "2", prompt=[1, 2, 3]
    )
    assert extends(assemble("t-1", [first, second])) == [None, 0]
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    third = at(2, "b", [{"role": "user", "content": image}, said("1")], "2", prompt=[1, 2, 3])
    assert extends(assemble("t-1", [first, third])) == [None, None]


def test_of_equal_replies_the_nearest_in_the_graph_is_gone_on_with() -> None:
    calls = [
        at(0, "a", [USER], "1", tags={"namespace": "team:1|left:1"}),
        at(1, "b", [USER], "1", tags={"namespace": "team:2|right:1"}),
        at(4, "c", [USER, said("1"), USER], "2", tags={"namespace": "team:1|left:1"}),
        at(5, "d", [USER, said("1"), USER], "2", tags={"namespace": "team:1|next:1"}),
        at(6, "e", [USER, said("1"), USER], "2", tags={"namespace": "elsewhere:1"}),
    ]
    assert extends(assemble("t-1", calls)) == [None, None, 0, 0, 1]


def choices(texts: list[str], second: float = 0.0, **changes: Any) -> list[CallRecord]:
    jitter = [0.0, -1e-5, 2e-5]  # each choice's record is stamped by itself
    return [
        at(second + jitter[i], "x" if i == 0 else f"x:{i}", [USER], text, **changes)
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("texts", "continued", "unchosen"),
    [
        (["a", "b", "c"], [], ["x:1", "x:2"]),
        (["a", "b", "c"], ["a"], ["x:1", "x:2"]),
        (["a", "b", "c"], ["c"], ["x", "x:1"]),
        (["a", "b", "c"], ["c", "b"], ["x"]),  # a client that explores both
        (["a", "b", "b"], ["b"], ["x", "x:2"]),
        (["a", "a", "b"], ["a"], ["x:1", "x:2"]),
    ],
)
def test_of_choices_those_count_that_the_client_goes_on_with(
    texts: list[str], continued: list[str], unchosen: list[str]
) -> None:
    later = [at(5 + i, f"y{i}", [USER, said(text), USER], "z") for i, text in enumerate(continued)]
    run = assemble("t-1", [*later, *reversed(choices(texts))])
    assert [t.call_id for t in run.turns][:3] == ["x", "x:1", "x:2"]
    assert excluded(run) == dict.fromkeys(unchosen, "unchosen")
    for turn in run.turns[3:]:
        assert turn.extends is not None and run.turns[turn.extends].excluded_because is None


def test_of_a_task_the_last_attempt_counts() -> None:
    def call(name: str, second: float, attempt: int, **where: Any) -> CallRecord:
        asked = [{"role": "user", "content": name}]
        return at(second, name, asked, name, tags={"attempt": attempt, "node": "n", **where})

    calls = [
        call("a1", 0, 1, namespace="n:1"),
        call("a2", 2, 2, namespace="n:1"),
        call("a2b", 4, 2, namespace="n:1"),
        call("beside", 1, 1, namespace="n:2"),
        call("other-thread", 1, 1, namespace="n:1", thread="t"),
        call("step1", 5, 1, step=1),
        call("step2", 6, 1, step=2),
        call("step2-again", 7, 2, step=2),
        call("nowhere", 8, 1),
        call("nowhere-again", 9, 2),  # of this node, but of which of its steps?
    ]
    assert excluded(assemble("t-1", calls)) == {"a1": "retried", "step2": "retried"}


def test_only_the_same_request_of_a_task_is_asked_again() -> None:
    def call(name: str, second: float, text: str = "", **more: Any) -> CallRecord:
        tags = {"node": "n", "namespace": "n:1", **more.pop("tags", {})}
        return at(second, name, more.pop("messages", [USER]), text or name, tags=tags, **more)

    good = call("good", 2)
    others = [
        call("hotter", 3, asked={"temperature": 2.0}),
        call("other-tools", 4, asked={"tools": [{"type": "function", "function": {"name": "f"}}]}),
        call("elsewhere", 5, tags={"namespace": "n:2"}),
        at(6, "of no graph", [USER], "of no graph", tags={"node": "n"}),
    ]
    assert excluded(assemble("t-1", [good, *others])) == {"good": "unchosen"}  # by the hotter


def test_a_lost_try_that_said_what_a_later_one_said_again_is_discarded() -> None:
    """Whatever tries said: the call that continues the last one seems to continue its equals."""
    for texts in (one for tries in (2, 3, 4) for one in product("ab", repeat=tries)):
        tries = [at(3 * i, f"try-{i}", [USER], text, retry=i) for i, text in enumerate(texts)]
        on = at(20, "on", [USER, said(texts[-1]), USER], "c")
        run = assemble("t-1", [*tries, on])
        lost = {call.id: "retried" for call in tries[:-1]}
        assert excluded(run) == excluded(assemble("t-1", tries)) == lost, texts
        assert extends(run)[-1] == len(tries) - 1


def again(name: str, second: float = 5, **changes: Any) -> CallRecord:
    return at(second, name, [USER], name, retry=1, **changes)


A, B = at(0, "a", [USER], "a"), at(0, "b", [USER], "b", number=9000)


@pytest.mark.parametrize(
    ("calls", "lost"),
    [
        ([at(0.1 * i, f"vote-{i}", [USER], str(i)) for i in range(5)], []),  # without the header
        ([A, B, again("c", 10)], ["b"]),  # of votes the one that ended last
        ([A, B, again("c", 10), again("d", 11)], ["a", "b"]),
        ([at(6, "c", [USER], "c", retry=2)], []),  # the tries before it were not sampled
        # The same prompt later, refused at first: the first reply did arrive.
        ([A, at(3, "on", [USER, said("a"), USER], "b"), again("c", 6)], []),
        ([A, again("c", asked={"temperature": 0.5})], []),
        ([A, again("c", asked={"tools": [{"type": "function"}]})], []),
        ([A, again("c", tags={"node": "other"})], []),
        ([A, again("c", policy="q")], []),
    ],
)
def test_what_a_retry_stands_for(calls: list[CallRecord], lost: list[str]) -> None:
    assert excluded(assemble("t-1", calls)) == dict.fromkeys(lost, "retried")


def test_all_choices_of_a_lost_reply_are_discarded() -> None:
    retried = [again("y"), again("y:1"), again("y:2")]
    run = assemble("t-1", [*choices(["a", "b", "c"]), *retried])
    lost = dict.fromkeys(["x", "x:1", "x:2"], "retried")
    assert excluded(run) == lost | dict.fromkeys(["y:1", "y:2"], "unchosen")


def test_a_long_run_costs_what_its_requests_hold() -> None:
    def seconds(turns: int) -> float:
        messages: list[Message] = [USER]
        calls: list[CallRecord] = []
        for turn in range(turns):
            text = f"reply {turn}: {json.dumps(list(range(40)))}"
            calls.append(at(2 * turn, f"c-{turn}", list(messages), text, prompt=[turn + 1]))
            messages += [said(text), USER]
        begun = time.process_time()
        assembled = assemble("t-1", calls)
        spent = time.process_time() - begun
        assert extends(assembled) == [None, *range(turns - 1)]
        return spent

    few, many = (min(seconds(turns) for _ in range(3)) for turns in (25, 100))
    assert many / few < 32  # requests hold 16 times as much; comparing every pair would cost 64
    with pytest.raises(InvalidRequest, match=r"4097 calls .* at most 4096"):
        assemble("t-1", [A] * 4097)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(0, 2)), max_size=8))
def test_whatever_a_client_does_each_call_is_one_turn(steps: list[tuple[int, int, int]]) -> None:
    calls: list[CallRecord] = []
    for index, (parent, n, retry) in enumerate(steps):
        messages = [USER]
        if calls and parent:
            base = calls[-min(parent, len(calls))]
            messages = [*base.request["messages"], base.reply, USER]
        for choice in range(n):
            name = f"c-{index}" if choice == 0 else f"c-{index}:{choice}"
            calls.append(at(index, name, messages, f"{retry}{choice}", retry=retry))
    run = assemble("t-1", calls)
    assert [t.call_id for t in run.turns] == [c.id for c in calls]
    for index, (turn, call) in enumerate(zip(run.turns, calls, strict=True)):
        assert run.prompt(index) == call.request["messages"]
        assert turn.reply == call.reply
        if turn.excluded_because == "unchosen":
            assert all(later.extends != index for later in run.turns)


class Program:
    """Tasks side by side, which ask again, fail and go on, and begin again after an interrupt.

    The oracle is the program: it notes the replies that it kept, and those that it asked for last.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.calls: list[CallRecord] = []
        self.kept: set[str] = set()
        self.last: set[str] = set()
        runs = [self._task(f"n:{number}") for number in range(self._draw.randint(1, 4))]
        second = 0
        while runs:  # parallel tasks take turns
            run = self._draw.choice(runs)
            second += 1
            try:
                name, messages, tags = next(run)
            except StopIteration:
                runs.remove(run)
                continue
            self.calls.append(at(second, name, messages, name, tags=tags))

    def _task(self, namespace: str) -> Iterator[tuple[str, list[Message], dict[str, Any]]]:
        """The calls of a task, in all its runs and attempts; what the last of them kept counts."""
        began = 10.0
        for run in range(runs := self._draw.choice([1, 1, 2, 3])):
            began += 10
            for attempt in range(1, 1 + (attempts := self._draw.choice([1, 1, 2]))):
                where = {"node": "n", "namespace": namespace, "task_began": began}
                for step in range(self._draw.randint(1, 3)):
                    counts = (run, attempt) == (runs - 1, attempts)
                    name = f"{namespace[2:]}/{run}/{attempt}/{step}"
                    asked = [{"role": "user", "content": f"{namespace} {step}"}]
                    names = [f"{name}/{again}" for again in range(self._draw.choice([1, 1, 2, 4]))]
                    for one in names:
                        yield one, asked, where | {"attempt": attempt}
                    kept = names[-1]
                    if self._draw.random() < 0.5:
                        kept = self._draw.choice(names)
                        on = [*asked, said(kept), {"role": "user", "content": "Go on."}]
                        yield f"{name}/on", on, where | {"attempt": attempt}
                        self.kept |= {f"{name}/on"} if counts else set()
                    if counts:
                        self.kept.add(kept)
                        self.last.add(names[-1])


def test_a_turn_has_the_tools_that_the_model_was_shown() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]
    only = {"allowed_tools": {"mode": "auto", "tools": [tools[1]]}, "type": "allowed_tools"}
    for choice, shown in ((None, tools), ("none", tools), (tools[0], tools), (only, tools[1:])):
        call = at(0, "a", [USER], "Friday.", asked={"tools": tools, "tool_choice": choice})
        assert list(assemble("t-1", [call]).turns[0].tools) == shown


@pytest.mark.soak
def test_what_a_random_program_kept_learns() -> None:
    """Besides, of what was asked again, the last: the server does not see which one was used."""
    excluded_for = Counter[str]()
    for seed in range(count(100, 20_000)):
        program = Program(seed)
        found = excluded(assemble("t-1", program.calls))
        learns = {call.id for call in program.calls} - found.keys()
        assert program.kept <= learns <= program.kept | program.last, seed
        excluded_for.update(found.values())
    assert excluded_for.keys() == {"interrupted", "retried", "unchosen"}
