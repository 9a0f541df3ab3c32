"""The documentation example's agent on a hosted model; with SmolLM2, see the real models' tests."""

import json
from itertools import pairwise
from typing import Any

from examples.documentation.agent import build_agent
from examples.documentation.pages import Question
from examples.documentation.train import solved
from tests.support.examples import HostedModel


async def test_the_agent_runs_on_a_hosted_model() -> None:
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
        agent = build_agent(hosted.chat, shots)
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
