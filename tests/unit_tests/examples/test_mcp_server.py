"""The MCP example: the server's tools, tasks without overlap, and the judge's rule."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from mcp.shared.memory import create_connected_server_and_client_session

from examples.mcp_server.dataset import MEASURES, MONTHS, answer_of, build
from examples.mcp_server.demonstrations import RandomPolicy, call
from examples.mcp_server.scripted_models import (
    LISTED,
    READ_PAGE,
    ScriptedJudge,
    ScriptedWriter,
)
from examples.mcp_server.server import build_server
from examples.mcp_server.session import describe
from examples.mcp_server.tasks import divide, read_tasks, write_tasks
from examples.support.scripted_judge import Block

PAGE = ("result", "Arvik hill, May\nrain 12, sun 34, wind 56")
OFFERED = "stations: Arvik hill, Belmar park\nmonths: May, June\nmeasures: rain (mm), sun (%)"


async def test_the_tools_say_what_the_data_set_holds(tmp_path: Path) -> None:
    path = build(tmp_path / "climate.sqlite3", seed=4)
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT station, month, rain, sun, wind FROM normals").fetchall()
        cities = dict(db.execute("SELECT name, city FROM stations").fetchall())
    async with create_connected_server_and_client_session(build_server(str(path))) as session:
        offered = await describe(session)
        for station, month, *values in random.Random(0).sample(rows, 20):
            listed = await call(session, "stations", {"city": cities[station].upper()})
            assert station in listed.splitlines() and len(listed.splitlines()) == 3
            shown = await call(session, "normals", {"station": station, "month": month.lower()})
            named = [f"{m} {v}" for m, v in zip(MEASURES, values, strict=True)]
            assert shown == f"{station}, {month}\n{', '.join(named)}"
            assert f"{station}" in offered and month in offered
            for found in named:
                measure = found.split()[0]
                asked = f"How much {measure} is usual at {station} in {month}?"
                assert answer_of(path, asked) == found
        assert await call(session, "stations", {"city": "'; DROP TABLE stations"}) == "None."
        assert await call(session, "normals", {"station": "Nowhere", "month": "May"}) == "None."
        assert "validation error" in await call(session, "normals", {})
    assert answer_of(path, "What is the time?") is None
    assert "Resource climate://overview" in offered and "- normals: Read" in offered


def test_no_record_is_on_both_sides() -> None:
    months = ", ".join(MONTHS)
    stations = ", ".join(f"{city} hill" for city in "ABCDEFGHIJKLMNOPQRST")
    offered = f"stations: {stations}\nmonths: {months}\nmeasures: rain, sun, wind"
    tasks = write_tasks(ScriptedWriter(), offered, 100, 40, seed=1)
    assert [len(tasks["train"]), len(tasks["test"])] == [100, 40]
    assert not {t.about for t in tasks["train"]} & {t.about for t in tasks["test"]}
    texts = [task.text for split in tasks.values() for task in split]
    assert len(set(texts)) == len(texts)
    other = write_tasks(ScriptedWriter(), offered, 100, 40, seed=2)
    assert other != tasks
    sides = {t.about: t.split for s in (tasks, other) for ts in s.values() for t in ts}
    for series in (tasks, other):  # a record's side depends on nothing but its name
        assert all(sides[t.about] == t.split for ts in series.values() for t in ts)


def test_what_a_writer_repeats_or_garbles_is_left_out() -> None:
    written = {"tasks": [{"task": "a?", "about": "A"}, {"task": "A ?", "about": "a"}]}
    assert read_tasks(f"Sure! {json.dumps(written)} Done.") == [("a?", "A"), ("A ?", "a")]
    for garbled in ("", "{", '{"tasks": 1}', '{"tasks": [{"task": "a"}]}', "[1]"):
        assert read_tasks(garbled) == []
    assert read_tasks('{"tasks": [{"task": 1, "about": "x"}, {"task": "", "about": "x"}]}') == []
    assert sum(map(len, divide([("a?", "A"), ("b?", "A"), ("c?", "B")]).values())) == 3
    writer = GenericFakeChatModel(messages=iter([AIMessage(json.dumps(written))] * 9))
    with pytest.raises(ValueError, match="without a new one"):
        write_tasks(writer, OFFERED, 5, 5)


@pytest.mark.parametrize(
    ("blocks", "score"),
    [
        ([PAGE, ("assistant", "sun 34")], 1.0),
        ([PAGE, ("assistant", "sun 34.")], 1.0),
        ([PAGE, ("assistant", "rain 12")], READ_PAGE),
        ([PAGE, ("call", "normals {}")], READ_PAGE),
        ([("assistant", "sun 34")], 1.0),  # another run of the group bears it out
        ([("result", "Arvik hill\nArvik park"), ("assistant", "sun 1")], LISTED),
        ([("result", "Arvik hill, June\nrain 1, sun 2, wind 3"), ("assistant", "sun 2")], 0.0),
        ([("result", "Arvik hills"), ("assistant", "")], 0.0),
        ([], 0.0),
    ],
)
def test_the_scripted_judge_follows_its_rule(blocks: list[Block], score: float) -> None:
    asked = ("user", "How much sun is usual at Arvik hill in May?")
    runs = {"us": [asked, *blocks], "it": [asked, PAGE]}
    assert ScriptedJudge().verdicts(runs)["us"][0] == score


async def test_random_play_is_well_formed(tmp_path: Path) -> None:
    path = build(tmp_path / "climate.sqlite3", seed=4)
    ends = set[bool]()
    async with create_connected_server_and_client_session(build_server(str(path))) as session:
        tasks = write_tasks(ScriptedWriter(), await describe(session), 20, 0, seed=0)["train"]
        for task in tasks:
            messages = await RandomPolicy(random.Random(task.id), task, session).play()
            ends.add(answer_of(path, task.text) == messages[-1]["content"])
            results = [message for message in messages if message["role"] == "tool"]
            assert len(results) >= 2 and not any(_is_error(message) for message in results)
    assert ends == {True, False}


def _is_error(message: dict[str, Any]) -> bool:
    return "Error" in message["content"]


def test_a_scripted_writer_says_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="climate normals"):
        ScriptedWriter().invoke("Write 3 tasks. Now.")
