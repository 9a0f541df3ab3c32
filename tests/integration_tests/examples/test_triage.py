"""The triage example on a real server: a router by a schema, and nothing of the fit is set."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.email_search.train import BASE_MODEL
from examples.support.demo import Setup
from examples.triage.agent import ROUTER_PROMPT, build_agent
from examples.triage.tickets import DEPARTMENTS, tickets
from examples.triage.train import DEMO
from langchain_art import ArtClient
from tests.support.examples import HostedModel, evaluation, server_of, short_fit


@pytest.mark.slow
def test_a_short_fit_and_the_evaluation_of_its_version(tmp_path: Path) -> None:
    """On the demo's small model, which routes by chance."""
    small = replace(DEMO, base_model=BASE_MODEL)
    with server_of(small, tmp_path) as server:
        found = short_fit(small, server.base_url, tmp_path / "out")
        assert 0 <= found["before"]["mean"] <= 1
        state = json.loads((tmp_path / "out" / "fit.json").read_text())
        assert state["identity"]["config"]["learning_rate"] is None
        assert min(state["learning_rate"].values()) > 0
        asked = ("--base-url", server.base_url, "--n", "2", "--few-shot", "1")
        assert "triage@" in evaluation(DEMO, *asked)
        with ArtClient(server.base_url) as client:
            told = [len(one.turns[0].messages) for one in client.trajectories(200)]
        assert told.count(4) == 2 and told.count(2) == len(told) - 2


async def test_the_agent_runs_on_a_hosted_model(tmp_path: Path) -> None:
    def router(body: dict[str, Any]) -> dict[str, Any]:
        system, *earlier, user = body["messages"]
        assert system["content"] == ROUTER_PROMPT
        assert [one["role"] for one in earlier] == ["user", "assistant"] * 4
        assert {json.loads(one["content"])["department"] for one in earlier[1::2]} == {*DEPARTMENTS}
        is_parcel = "parcel" in user["content"]
        return {"content": json.dumps({"department": "shipping" if is_parcel else "billing"})}

    with HostedModel(router) as hosted:
        shots = Setup(DEMO, "", tmp_path, 1, few_shot=4).shots(tickets("train", 8))
        agent = build_agent(hosted.chat, shots)
        found = await agent.ainvoke({"message": "Where is my parcel?"})
        assert found["department"] == "shipping"
