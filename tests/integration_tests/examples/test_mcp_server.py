"""The MCP example: a short fit with RULER alone, its evaluation, the graph on a hosted model."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.mcp_server import dataset, server
from examples.mcp_server.agent import answer, build_agent
from examples.mcp_server.session import McpServer
from examples.mcp_server.train import DEMO, main
from langchain_art import ArtClient
from tests.support.examples import HostedModel, calling, evaluation, refusal, server_of, short_fit


@pytest.mark.slow
def test_the_demo_trains_on_the_judge_alone(tmp_path: Path) -> None:
    with server_of(DEMO, tmp_path) as server:
        found = short_fit(DEMO, server.base_url, tmp_path / "out", groups_per_step=2, held_out=2)
        assert found["excluded"].get("groups.unjudged", 0) == 0
        with ArtClient(server.base_url) as client:
            runs = client.trajectories(1000)
        said = evaluation(DEMO, "mcp-agent@1", "--base-url", server.base_url, "--n", "2")
        assert "mcp-agent@1: " in said
    judged = {str(run.scenario).split("-")[0]: "judged" in run.metadata for run in runs}
    assert judged == {"train": True, "test": False}
    tasks = json.loads((tmp_path / "out" / "tasks.json").read_text())
    about = {split: {task["about"] for task in tasks[split]} for split in ("train", "test")}
    assert about["train"] and about["test"] and not about["train"] & about["test"]


async def test_it_runs_unchanged_on_a_hosted_model(tmp_path: Path) -> None:
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
        assert [tool.name for tool in started.tools] == ["stations", "normals"]
        with HostedModel(reply) as hosted:
            agent = build_agent(hosted.chat, started.tools)
            state = await agent.ainvoke({"messages": [("user", "How much sun in Arvik in May?")]})
    finally:
        started.close()
    station = state["messages"][-2].text.split(",")[0]
    asked = f"How much sun is usual at {station} in May?"
    assert answer(state) == dataset.answer_of(database, asked)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--server", "uvx other"], "name models"),
        (["--server", "x", "--task-writer", "openai/o3", "--judge", "openai/o3"], "a real model"),
    ],
)
def test_another_server_takes_real_models(options: list[str], words: str, tmp_path: Path) -> None:
    assert words in refusal(main, *options, "--out", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
