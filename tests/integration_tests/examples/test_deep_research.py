"""Deep research: a short fit, its evaluation, and the same graph on a hosted model."""

from pathlib import Path
from typing import Any

import pytest

from examples.deep_research.agent import PLAN, READ, build_agent
from examples.deep_research.environment import make_world, reward
from examples.deep_research.train import DEMO
from tests.support.examples import HostedModel, evaluation, server_of, short_fit
from tests.support.soak import in_soak


# `test_text_to_sql.py` has a fit of this kind in `make test`.
@in_soak
@pytest.mark.slow
def test_all_three_nodes_are_trained_and_measured(tmp_path: Path) -> None:
    with server_of(DEMO, tmp_path) as server:
        found = short_fit(DEMO, server.base_url, tmp_path / "out")
        assert found["measures"].keys() == {"plan", "read", "write"}
        assert found["measures"]["plan"]["after"]["n"] == 4
        history = (tmp_path / "out" / "history.jsonl").read_text()
        assert all(f'"{node}":{{"calls"' in history for node in ("plan", "search/read", "write"))
        said = evaluation(DEMO, "research-agent@1", "--base-url", server.base_url, "--n", "8")
        assert "research-agent@1: " in said and "plan: " in said


async def test_it_runs_unchanged_on_a_hosted_model() -> None:
    world = make_world(0)
    scenario = world.scenarios("test", 1)[0]
    facts = dict(zip((" ".join(p) for p in scenario.pairs), scenario.facts, strict=True))

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        asked, shown = (message["content"] for message in body["messages"])
        if asked == PLAN:
            return {"content": "\n".join(f"- {query}" for query in facts)}
        if asked == READ:
            return {"content": facts[shown.splitlines()[0]] + "."}
        return {"content": ", ".join(line.split(": ")[1] for line in shown.splitlines()[1:])}

    with HostedModel(reply) as hosted:
        asked = {"question": scenario.question}
        state = await build_agent(hosted.chat).ainvoke(asked, context=world.corpus)
    assert reward(scenario, state["report"]) == 1.0
    assert len(hosted.requests) == len(facts) + 2
