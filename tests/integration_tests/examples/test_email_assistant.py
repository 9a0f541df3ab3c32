"""The e-mail assistant on a real server: criteria score training, answers score held-out runs."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.email_assistant.agent import SYSTEM_PROMPT
from examples.email_assistant.mailbox import scenarios
from examples.email_assistant.train import DEMO, WEIGHTS, build_fit, criteria, make_rollout
from examples.support.demo import Setup
from langchain_art import ArtClient
from tests.support.examples import HostedModel, calling, evaluation, server_of, short_fit
from tests.support.soak import in_soak

KINDS = {"success, newest", "success, oldest", "success, sender"}


# `test_mcp_server.py` has a fit of this kind in `make test`.
@in_soak
@pytest.mark.slow
def test_a_short_fit_and_the_evaluation_of_its_version(tmp_path: Path) -> None:
    def judged(setup: Setup) -> Any:
        return build_fit(replace(setup, evaluator=criteria()))

    with server_of(DEMO, tmp_path) as server:
        demo = replace(DEMO, build=judged)
        found = short_fit(demo, server.base_url, tmp_path / "out")
        assert set(found["measures"]) <= KINDS and found["measures"]
        with ArtClient(server.base_url) as client:
            runs = client.trajectories(1000)
        train = [run for run in runs if str(run.scenario).startswith("train")]
        parts = {f"criteria/{name}" for name in WEIGHTS}
        assert train and all({"criteria", *parts} <= {*run.scores} for run in train)
        assert all(run.reward in (0.0, 1.0) for run in runs if run not in train)
        said = evaluation(DEMO, "--base-url", server.base_url, "--n", "8")
        assert re.search(r"email-assistant@\d+: [01]\.\d+ ± ", said) and "success, " in said


async def test_the_agent_runs_on_a_hosted_model() -> None:
    """One that does what the question calls for."""

    def reader(body: dict[str, Any]) -> dict[str, Any]:
        system, user, *rest = body["messages"]
        assert system["content"] == SYSTEM_PROMPT
        assert [tool["function"]["name"] for tool in body["tools"]] == [
            *("search", "filter", "sort", "select", "answer")
        ]
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
        rollout = make_rollout(hosted.chat, judged=False)  # type: ignore[arg-type]
        for scenario in scenarios("test", 6, 0):
            run = await rollout(scenario)
            assert (run.reward, run.scores[f"success, {scenario.kind}"]) == (1.0, 1.0)
