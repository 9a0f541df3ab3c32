"""Agents of examples as they are, on a hosted model that plays well; and their questions.

Small models of other examples are trained in `make test`: see `test_short_fits.py`.
"""

import json
import re
from itertools import pairwise
from typing import Any

import pytest

import examples.deep_research.agent as deep_research
import examples.documentation.agent as documentation
import examples.email_assistant.train as email_assistant
import examples.frozen_lake.agent as frozen_lake
import examples.function_calling.train as function_calling
import examples.temporal_clue.train as temporal_clue
import examples.tic_tac_toe.agent as tic_tac_toe
import examples.twenty_forty_eight.agent as twenty_forty_eight
from examples.deep_research.environment import make_world
from examples.deep_research.environment import reward as worth_of_report
from examples.documentation.pages import Question
from examples.documentation.train import solved as solved_page
from examples.email_assistant.mailbox import scenarios
from examples.frozen_lake.environment import MAX_MOVES, Walk
from examples.function_calling.agent import CALLER_PROMPT
from examples.function_calling.leaderboard import called, grade, questions
from examples.function_calling.leaderboard import solved as right_call
from examples.temporal_clue.environment import QUESTIONS, puzzles
from examples.tic_tac_toe.environment import EMPTY, best_moves
from examples.twenty_forty_eight.environment import Game
from tests.support.examples import HostedModel, calling
from tests.support.real_models import leaderboard


async def test_deep_research() -> None:
    world = make_world(0)
    scenario = world.scenarios("test", 1)[0]
    facts = dict(zip((" ".join(p) for p in scenario.pairs), scenario.facts, strict=True))

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        asked, shown = (message["content"] for message in body["messages"])
        if asked == deep_research.PLAN:
            return {"content": "\n".join(f"- {query}" for query in facts)}
        if asked == deep_research.READ:
            return {"content": facts[shown.splitlines()[0]] + "."}
        return {"content": ", ".join(line.split(": ")[1] for line in shown.splitlines()[1:])}

    with HostedModel(reply) as hosted:
        asked = {"question": scenario.question}
        state = await deep_research.build_agent(hosted.chat).ainvoke(asked, context=world.corpus)
    assert worth_of_report(scenario, state["report"]) == 1.0
    assert len(hosted.requests) == len(facts) + 2


async def test_documentation() -> None:
    """Each call is shown the ones before it, and may only choose among what is there."""
    does = "Wrap a single paragraph of text, returning a list of wrapped lines"
    shots = solved_page(Question("other", does, "width", "textwrap.wrap", "70"))
    wanted = {"search": "paragraph", "open": "textwrap.wrap", "answer": "70"}
    told: list[list[dict[str, Any]]] = []

    def replies(body: dict[str, Any]) -> dict[str, Any]:
        schema = body["response_format"]["json_schema"]["schema"]
        [name] = schema["required"]
        assert wanted[name] in schema["properties"][name]["enum"]
        told.append(body["messages"])
        return {"content": json.dumps({name: wanted[name]})}

    with HostedModel(replies) as hosted:
        agent = documentation.build_agent(hosted.chat, shots)
        found = await agent.ainvoke({"does": does, "parameter": "width"})
    assert (found["opened"], found["answer"]) == ("textwrap.wrap", "70")
    assert [len(messages) for messages in told] == [8, 10, 12]
    # The example of itself: the same choices among the same options.
    assert [one["content"] for one in told[-1][1:7:2]] == [
        one["content"] for one in told[-1][7:12:2]
    ]
    for before, after in pairwise(told):
        assert after[: len(before)] == before
    assert "width=70" in told[-1][-1]["content"]


async def test_email_assistant() -> None:
    def reader(body: dict[str, Any]) -> dict[str, Any]:
        """Does what the question calls for."""
        _, user, *rest = body["messages"]
        question, results = user["content"], [m["content"] for m in rest if m["role"] == "tool"]
        sender = re.search(r'as "(\w+)" says', question)
        order = "newest" if "newest" in question else "oldest"
        narrow = ("filter", {"sender": sender[1]}) if sender else ("sort", {"order": order})
        calls: list[tuple[str, dict[str, Any]]] = [
            ("search", {"query": re.findall(r'"(.+?)"', question)[0]}),
            narrow,
            ("select", {"number": 1}),
            ("answer", {"text": results[-1].rpartition(" on ")[2] if results else ""}),
        ]
        name, arguments = calls[len(results)]
        return calling(name, **arguments)

    with HostedModel(reader) as hosted:
        rollout = email_assistant.make_rollout(hosted.chat, judged=False)  # type: ignore[arg-type]
        for scenario in scenarios("test", 6, 0):
            run = await rollout(scenario)
            assert (run.reward, run.scores[f"success, {scenario.kind}"]) == (1.0, 1.0)


async def test_frozen_lake() -> None:
    shown: list[str] = []

    def first_of_the_open_moves(body: dict[str, Any]) -> dict[str, Any]:
        system, user = body["messages"]
        assert system["content"] == frozen_lake.SYSTEM_PROMPT
        shown.append(user["content"])
        schema = body["response_format"]["json_schema"]["schema"]
        return {"content": json.dumps({"move": schema["properties"]["move"]["enum"][0]})}

    with HostedModel(first_of_the_open_moves) as hosted:
        walk = Walk(5)
        first = walk.view
        await frozen_lake.build_agent(hosted.chat).ainvoke({"walk": walk})
    assert shown[0] == first and walk.over
    assert 1 < len(shown) <= MAX_MOVES and len(set(shown)) > 1


async def test_function_calling() -> None:
    leaderboard()
    asked = {one.request: one for one in questions("held out")[::20]}

    def caller(body: dict[str, Any]) -> dict[str, Any]:
        system, *shots, user = body["messages"]
        assert system["content"] == CALLER_PROMPT and len(shots) == 3
        assert body["tool_choice"] == "required" and body["parallel_tool_calls"] is False
        one = asked[user["content"]]
        told = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
        assert set(told) == {called(each) for each in one.functions}
        assert all(each["type"] == "object" for each in told.values())
        [call] = getattr(right_call(one)[1], "tool_calls")  # noqa: B009
        return calling(call["name"], **call["args"])

    with HostedModel(caller) as hosted:
        rollout = function_calling.make_rollout(hosted.chat, right_call(questions("train")[0]))
        runs = [await rollout(one) for one in asked.values()]
    assert {run.reward for run in runs} == {1.0}
    assert {run.scores["correct"] for run in runs} == {1.0}


async def test_temporal_clue() -> None:
    def detective(body: dict[str, Any]) -> dict[str, Any]:
        """Thinks first, and answers with the row that the last clue is about."""
        *records, thief = body["messages"][-1]["content"].splitlines()
        value = thief.rstrip(".").split()[-1]
        (row,) = [line for line in records if value in line.rstrip(".").split()]
        said = re.fullmatch(r"(\w+) was in the (\w+) at (\w+) with the (\w+)\.", row)
        assert said is not None
        lines = [f"{name}: {one}" for name, one in zip(QUESTIONS, said.groups(), strict=True)]
        return {"content": "\n".join([f"It is about {value}.", *lines])}

    with HostedModel(detective) as hosted:
        rollout = temporal_clue.make_rollout(hosted.chat)
        runs = [await rollout(puzzle) for puzzle in puzzles("test", 3, 0)]
    assert {(run.reward, run.scores["all_right"]) for run in runs} == {(1.0, 1.0)}


async def test_tic_tac_toe() -> None:
    def perfect(body: dict[str, Any]) -> dict[str, Any]:
        cells = body["messages"][1]["content"].replace("\n", " ").split()[:9]
        board = "".join(cell if cell in "XO" else "." for cell in cells)
        return {"content": f"I take {'abcdefghi'[best_moves(board)[0]]}."}

    with HostedModel(perfect) as hosted:
        agent = tic_tac_toe.build_agent(hosted.chat)
        for match in (
            tic_tac_toe.Match("X"),
            tic_tac_toe.Match("O"),
            tic_tac_toe.Match(opponent="self"),
        ):
            state = await agent.ainvoke({"board": EMPTY}, context=match)
            assert tic_tac_toe.points(state) == {"X": 0.5, "O": 0.5}
    with HostedModel(lambda body: {"content": "Good luck!"}) as hosted:
        agent = tic_tac_toe.build_agent(hosted.chat)
        state = await agent.ainvoke({"board": EMPTY}, context=tic_tac_toe.Match("O"))
        assert state["illegal"] == "O" and tic_tac_toe.points(state)["O"] == 0.0


async def test_twenty_forty_eight() -> None:
    def left_or_down(body: dict[str, Any]) -> dict[str, Any]:
        moves = dict(line.split(": ") for line in body["messages"][1]["content"].split("\n")[3:])
        found = [move for move in ("left", "down", "up", "right") if moves[move] != "nothing"]
        return {"content": f"I move {found[0]}."}

    with HostedModel(left_or_down) as hosted:
        game = Game("hosted")
        await twenty_forty_eight.build_agent(hosted.chat).ainvoke({"game": game})
        assert game.is_over and game.illegal == 0
        assert len(hosted.requests) == game.made > 5


# --- the leaderboard of function calling ----------------------------------------------------------


def test_a_third_of_the_leaderboards_questions_is_held_out_and_of_each_kind() -> None:
    leaderboard()
    train, held_out = questions("train"), questions("held out")
    assert (len(train), len(held_out)) == (479, 220)
    assert not {one.request for one in train} & {one.request for one in held_out}
    for part in (train, held_out):
        kinds = {one.id.split("_")[0] for one in part}
        assert kinds == {"simple", "multiple", "live"}
        assert any(len(one.functions) > 1 for one in part)


def test_the_leaderboards_checker_takes_each_answer_of_its_own_and_no_other() -> None:
    leaderboard()
    for one in (*questions("train"), *questions("held out")):
        [call] = getattr(right_call(one)[1], "tool_calls")  # noqa: B009
        assert grade(one, [call]).correct and grade(one, [call]).reward == pytest.approx(1.0)
        strange = call | {"args": {**call["args"], "none-of-its-arguments": 1}}
        assert not grade(one, [strange]).correct and grade(one, [strange]).reward < 1
        for name in one.needed:
            less = call | {"args": {k: v for k, v in call["args"].items() if k != name}}
            assert not grade(one, [less]).correct and grade(one, [less]).reward < 1
