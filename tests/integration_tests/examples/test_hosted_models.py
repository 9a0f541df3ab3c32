"""Agents of examples as they are, on a hosted model that plays well; and their questions.

The other agents are trained in `make test`: see `test_short_fits.py` and the real models.
"""

import re
from typing import Any

import pytest

import examples.deep_research.agent as deep_research
import examples.email_assistant.train as email_assistant
import examples.temporal_clue.train as temporal_clue
import examples.tic_tac_toe.agent as tic_tac_toe
import examples.twenty_forty_eight.agent as twenty_forty_eight
from examples.deep_research.environment import make_world
from examples.deep_research.environment import reward as worth_of_report
from examples.email_assistant.mailbox import scenarios
from examples.function_calling.leaderboard import grade, questions
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
