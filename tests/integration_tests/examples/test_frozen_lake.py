"""The Frozen Lake example on a hosted model: it answers by the schema of the open moves."""

import json
from typing import Any

from examples.frozen_lake.agent import SYSTEM_PROMPT, build_agent
from examples.frozen_lake.environment import MAX_MOVES, Walk
from tests.support.examples import HostedModel


async def test_the_agent_runs_on_a_hosted_model() -> None:
    shown: list[str] = []

    def first_of_the_open_moves(body: dict[str, Any]) -> dict[str, Any]:
        system, user = body["messages"]
        assert system["content"] == SYSTEM_PROMPT
        shown.append(user["content"])
        schema = body["response_format"]["json_schema"]["schema"]
        return {"content": json.dumps({"move": schema["properties"]["move"]["enum"][0]})}

    with HostedModel(first_of_the_open_moves) as hosted:
        walk = Walk(5)
        first = walk.view
        await build_agent(hosted.chat).ainvoke({"walk": walk})
    assert shown[0] == first and walk.over
    assert 1 < len(shown) <= MAX_MOVES and len(set(shown)) > 1
