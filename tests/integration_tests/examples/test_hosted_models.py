"""The examples' agents as they are, on a hosted model that plays well."""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import examples.codenames.train as codenames
import examples.deep_agent.agent as deep_agent
import examples.deep_research.agent as deep_research
import examples.email_assistant.train as email_assistant
import examples.function_calling.train as function_calling
import examples.temporal_clue.train as temporal_clue
import examples.text_to_sql.agent as text_to_sql
import examples.tic_tac_toe.agent as tic_tac_toe
import examples.triage.agent as triage
import examples.twenty_forty_eight.agent as twenty_forty_eight
from examples.codenames.agent import SPYMASTER_PROMPT
from examples.codenames.environment import boards
from examples.codenames.words import KIND_OF
from examples.deep_agent.environment import haystacks
from examples.deep_research.environment import make_world
from examples.deep_research.environment import reward as worth_of_report
from examples.documentation.agent import build_agent as documentation
from examples.documentation.pages import Question
from examples.documentation.train import solved
from examples.email_assistant.mailbox import scenarios
from examples.frozen_lake.agent import build_agent as frozen_lake
from examples.frozen_lake.environment import MAX_MOVES, Walk
from examples.function_calling.leaderboard import called, questions
from examples.function_calling.leaderboard import solved as right_call
from examples.mcp_server import dataset, server
from examples.mcp_server.agent import answer
from examples.mcp_server.agent import build_agent as mcp_agent
from examples.mcp_server.session import McpServer
from examples.support.demo import Setup
from examples.temporal_clue.environment import QUESTIONS, puzzles
from examples.text_to_sql.environment import Databases
from examples.text_to_sql.environment import reward as worth_of_queries
from examples.tic_tac_toe.environment import EMPTY, best_moves
from examples.triage.tickets import DEPARTMENTS, tickets
from examples.triage.train import DEMO as TRIAGE
from examples.twenty_forty_eight.environment import Game
from langchain_art.environments import from_reasoning_gym
from tests.support.examples import HostedModel, calling
from tests.support.real_models import leaderboard


async def test_codenames() -> None:
    def player(body: dict[str, Any]) -> dict[str, Any]:
        """Knows of which kind each word is, and plays both roles."""
        asked, shown = (message["content"] for message in body["messages"])
        first, *_, last = (line.split(": ")[1].split() for line in shown.splitlines())
        if asked == SPYMASTER_PROMPT:
            return {"content": f"Clue: {KIND_OF[first[0]]} {len(first)}"}
        return {"content": f"guess: {', '.join(w for w in first if KIND_OF[w] == last[0])}"}

    with HostedModel(player) as hosted:
        rollout = codenames.make_rollout(hosted.chat, hosted.chat)
        runs = [await rollout(board) for board in boards("test", 3, 0)]
    names = ("legal_clues", "good_clues", "right_counts", "guesses_follow_clue")
    for run in runs:
        assert run.reward == 1.0
        assert run.scores == dict.fromkeys(names, 1.0) | {"assassin_met": 0.0}


async def test_deep_agent() -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        system, asked, *results = [str(message["content"]) for message in body["messages"]]
        searches = system == deep_agent.SEARCHER_PROMPT
        if results and searches:
            return {"content": re.findall(r"\S.*\.$", results[-1], re.MULTILINE)[0]}
        if results:
            return {"content": f"<answer>{results[-1].split()[1]}</answer>"}
        if searches:
            return calling("grep", pattern=asked.removeprefix("Who"), output_mode="content")
        return calling("task", description=asked.partition("?")[0], subagent_type="searcher")

    with HostedModel(reply) as hosted:
        agent = deep_agent.build_agent(hosted.chat)
        env = from_reasoning_gym(haystacks(0, 4), agent, held_out=0)
        run = await env.rollout(env.train[0])
    assert run.reward == 1.0 and len(hosted.requests) == 4
    assert deep_agent.FILE in run.turns[2].messages[-1]["content"]


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
    shots = solved(Question("other", does, "width", "textwrap.wrap", "70"))
    wanted = {"search": "paragraph", "open": "textwrap.wrap", "answer": "70"}
    told: list[list[dict[str, Any]]] = []

    def replies(body: dict[str, Any]) -> dict[str, Any]:
        schema = body["response_format"]["json_schema"]["schema"]
        [name] = schema["required"]
        assert wanted[name] in schema["properties"][name]["enum"]
        told.append(body["messages"])
        return {"content": json.dumps({name: wanted[name]})}

    with HostedModel(replies) as hosted:
        agent = documentation(hosted.chat, shots)
        found = await agent.ainvoke({"does": does, "parameter": "width"})
    assert (found["opened"], found["answer"]) == ("textwrap.wrap", "70")
    assert [len(messages) for messages in told] == [8, 10, 12]
    # The example of itself: the same choices among the same options.
    said = [one["content"] for one in told[-1]]
    assert said[1:7:2] == said[7:12:2] and "width=70" in said[-1]
    assert all(after[: len(before)] == before for before, after in pairwise(told))


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
        shown.append(body["messages"][1]["content"])
        schema = body["response_format"]["json_schema"]["schema"]
        return {"content": json.dumps({"move": schema["properties"]["move"]["enum"][0]})}

    with HostedModel(first_of_the_open_moves) as hosted:
        walk = Walk(5)
        first = walk.view
        await frozen_lake(hosted.chat).ainvoke({"walk": walk})
    assert shown[0] == first and walk.over
    assert 1 < len(shown) <= MAX_MOVES and len(set(shown)) > 1


async def test_function_calling() -> None:
    leaderboard()
    asked = {one.request: one for one in questions("held out")[::20]}

    def caller(body: dict[str, Any]) -> dict[str, Any]:
        _, *shots, user = body["messages"]
        assert len(shots) == 3
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
    assert {(run.reward, run.scores["correct"]) for run in runs} == {(1.0, 1.0)}


async def test_mcp_server(tmp_path: Path) -> None:
    database = dataset.build(tmp_path / "climate.sqlite3")
    started = McpServer([sys.executable, server.__file__, str(database)])

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        messages = body["messages"]
        results = [message for message in messages if message["role"] == "tool"]
        if not results:
            return calling("stations", city="Arvik")
        text = "".join(part["text"] for part in results[-1]["content"])
        if len(results) == 1:
            return calling("normals", station=text.splitlines()[0])
        if len(results) == 2:  # the error says what is missing
            assert "month" in text and "Field required" in text
            given = json.loads(messages[-2]["tool_calls"][0]["function"]["arguments"])
            return calling("normals", **given, month="May")
        [sun] = [part for part in text.replace("\n", ", ").split(", ") if "sun" in part]
        return {"content": sun}

    try:
        with HostedModel(reply) as hosted:
            agent = mcp_agent(hosted.chat, started.tools)
            state = await agent.ainvoke({"messages": [("user", "How much sun in Arvik in May?")]})
    finally:
        started.close()
    station = state["messages"][-2].text.split(",")[0]
    asked = f"How much sun is usual at {station} in May?"
    assert answer(state) == dataset.answer_of(database, asked)


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


async def test_text_to_sql(tmp_path: Path) -> None:
    databases = Databases(tmp_path)
    [scenario] = databases.build(0, 1)["test"]

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        asked, shown = (message["content"] for message in body["messages"])
        if asked == text_to_sql.WRITE:
            return {"content": "```sql\nSELECT COUNT(*) FROM nowhere;\n```"}
        if asked == text_to_sql.CHECK:
            wrong = "no such table" in shown
            said = f"The query is {text_to_sql.WRONG}." if wrong else text_to_sql.RIGHT.upper()
            return {"content": said}
        return {"content": scenario.gold}

    with HostedModel(reply) as hosted:
        state = await text_to_sql.build_agent(hosted.chat).ainvoke(
            {"schema": scenario.schema, "question": scenario.question},
            context=databases.of(scenario),
        )
    assert state["queries"] == ["SELECT COUNT(*) FROM nowhere", scenario.gold]
    assert state["approved"] == [False, True]
    assert worth_of_queries(scenario, databases, state["queries"]) == 1.0


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


async def test_triage(tmp_path: Path) -> None:
    def router(body: dict[str, Any]) -> dict[str, Any]:
        _, *earlier, user = body["messages"]
        assert [one["role"] for one in earlier] == ["user", "assistant"] * 4
        assert {json.loads(one["content"])["department"] for one in earlier[1::2]} == {*DEPARTMENTS}
        is_parcel = "parcel" in user["content"]
        return {"content": json.dumps({"department": "shipping" if is_parcel else "billing"})}

    with HostedModel(router) as hosted:
        shots = Setup(TRIAGE, "", tmp_path, 1, few_shot=4).shots(tickets("train", 8))
        agent = triage.build_agent(hosted.chat, shots)
        found = await agent.ainvoke({"message": "Where is my parcel?"})
        assert found["department"] == "shipping"


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
