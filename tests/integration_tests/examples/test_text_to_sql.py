"""Text-to-SQL: a short fit, its evaluation, and the same graph on a hosted model."""

from pathlib import Path
from typing import Any

import pytest

from examples.text_to_sql.agent import CHECK, RIGHT, WRITE, WRONG, build_agent
from examples.text_to_sql.environment import Databases, reward
from examples.text_to_sql.train import DEMO
from tests.support.examples import HostedModel, evaluation, server_of, short_fit


@pytest.mark.slow
def test_all_three_nodes_are_trained_and_held_out_runs_have_one_reward(tmp_path: Path) -> None:
    with server_of(DEMO, tmp_path) as server:
        found = short_fit(DEMO, server.base_url, tmp_path / "out")
        for when in ("before", "after"):
            assert found["measures"]["first query right"][when]["n"] == 4
            assert 0 <= found[when]["mean"] <= 1  # rewards of calls would come on top
        history = (tmp_path / "out" / "history.jsonl").read_text()
        assert all(f'"{node}":{{"calls"' in history for node in ("write", "check", "rewrite"))
        said = evaluation(DEMO, "sql-agent@1", "--base-url", server.base_url, "--n", "2")
        assert "sql-agent@1: " in said and "first query right: " in said


async def test_it_runs_unchanged_on_a_hosted_model(tmp_path: Path) -> None:
    databases = Databases(tmp_path)
    [scenario] = databases.build(0, 1)["test"]

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        asked, shown = (message["content"] for message in body["messages"])
        if asked == WRITE:
            return {"content": "```sql\nSELECT COUNT(*) FROM nowhere;\n```"}
        if asked == CHECK:
            wrong = "no such table" in shown
            return {"content": f"The query is {WRONG}." if wrong else RIGHT.upper()}
        return {"content": scenario.gold}

    with HostedModel(reply) as hosted:
        state = await build_agent(hosted.chat).ainvoke(
            {"schema": scenario.schema, "question": scenario.question},
            context=databases.of(scenario),
        )
    assert state["queries"] == ["SELECT COUNT(*) FROM nowhere", scenario.gold]
    assert state["approved"] == [False, True]
    assert reward(scenario, databases, state["queries"]) == 1.0
