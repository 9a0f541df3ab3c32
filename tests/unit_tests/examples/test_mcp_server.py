import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from mcp.shared.memory import create_connected_server_and_client_session

from examples.mcp_server.build_base_model import call
from examples.mcp_server.dataset import MEASURES, answer_of, build
from examples.mcp_server.scripted_models import LISTED, READ_PAGE, ScriptedJudge
from examples.mcp_server.server import build_server
from examples.mcp_server.session import describe
from examples.support.scripted_judge import Block

PAGE = ("result", "Arvik hill, May\nrain 12, sun 34, wind 56")


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


@pytest.mark.parametrize(
    ("blocks", "score"),
    [
        ([PAGE, ("assistant", "sun 34.")], 1.0),
        ([PAGE, ("assistant", "rain 12")], READ_PAGE),
        ([("assistant", "sun 34")], 1.0),  # another run of the group bears it out
        ([("result", "Arvik hill\nArvik park"), ("assistant", "sun 1")], LISTED),
        ([("result", "Arvik hill, June\nrain 1, sun 2, wind 3"), ("assistant", "sun 2")], 0.0),
    ],
)
def test_the_scripted_judge_follows_its_rule(blocks: list[Block], score: float) -> None:
    asked = ("user", "How much sun is usual at Arvik hill in May?")
    runs = {"us": [asked, *blocks], "it": [asked, PAGE]}
    assert ScriptedJudge().verdicts(runs)["us"][0] == score
