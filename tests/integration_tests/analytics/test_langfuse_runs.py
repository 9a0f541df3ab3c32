"""Traces of Langfuse, written by its real SDK, as `langchain-art analyze` reads them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from langchain_art.analytics.analysis import analyze
from langchain_art.analytics.langfuse_runs import langfuse_runs
from langchain_art.cli.main import app, main
from langchain_art.export.ids import CALL, SCENARIO, TRAJECTORY
from tests.support.langfuse_server import LangfuseServer

QUESTION = [{"role": "user", "content": "When did Ann write?"}]
SEARCH = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "t1", "type": "function", "function": {"name": "search", "arguments": ""}}
    ],
}
FAILED = [*QUESTION, SEARCH, {"role": "tool", "tool_call_id": "t1", "content": "Error: no mail 7"}]
ANSWER = {"role": "assistant", "content": "On Monday."}


def write(server: LangfuseServer) -> list[str]:
    """Four runs of two versions, each of a search and an answer; the last one fails."""
    client = server.client()
    traces: list[str] = []
    for number in range(4):
        known = {TRAJECTORY: f"run-{number}", SCENARIO: f"q-{number % 2}"}
        trace = client.create_trace_id(seed=f"{server.keys[0]}-{number}")
        with client.start_as_current_observation(
            as_type="agent", name="mail", trace_context={"trace_id": trace}, metadata=known
        ) as root:
            for index, (prompt, reply) in enumerate([(QUESTION, SEARCH), (FAILED, ANSWER)]):
                with client.start_as_current_observation(
                    as_type="generation",
                    name="agent",
                    model=f"email-agent@{number // 2}",
                    input={"messages": prompt},
                    output=reply,
                    usage_details={"input": 30, "output": 5},
                    metadata=known | {CALL: f"c-{number}-{index}"},
                ):
                    pass
            if number == 3:
                root.update(level="ERROR", status_message="Timeout after 31 s")
        traces.append(trace)
    client.flush()
    return traces


def test_traces_of_langfuse_are_analyzed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with LangfuseServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        traces = write(server)
        for trace, value in zip(traces, [0.0, 1.0, 1.0], strict=False):
            server.annotate(trace, "human_reward", value)
        asked = ["analyze", "--langfuse", "--score", "human_reward"]
        done = CliRunner().invoke(app, [*asked, "--json"])
        limited = CliRunner().invoke(app, [*asked, "--limit", "1"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(one["version"], one["runs"], one["failed"]) for one in found["versions"]] == [
        ("email-agent@0", 2, 0),
        ("email-agent@1", 2, 1),
    ]
    assert [one["success_rate"] for one in found["versions"]] == [0.5, 0.5]
    assert [one["scenarios"] for one in found["versions"]] == [2, 2]
    assert [one["prompt_tokens"] for one in found["nodes"]] == [120, 120]
    assert all(one["node"] == "agent" and one["latency_p50"] >= 0 for one in found["nodes"])
    actions = {one["action"]: one["count"] for one in found["actions"]}
    assert actions == {"search": 4, "(answer)": 4}
    errors = {(one["where"], one["name"], one["pattern"]): one for one in found["errors"]}
    assert errors["tool", "search", "Error: no mail <n>"]["count"] == 4
    assert errors["run", "-", "Timeout after <n> s"]["example"] == "run-3"
    assert "newest 1 runs" in limited.stdout, limited.output
    with pytest.raises(SystemExit):
        main([*asked, "--held-out"])
    assert "--environment NAME" in capsys.readouterr().err


def test_a_call_that_is_no_chat_is_counted_and_one_without_a_prompt_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = [(QUESTION, SEARCH), (QUESTION, {"role": "user", "content": "?"}), (None, ANSWER)]
    with LangfuseServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        client = server.client()
        with client.start_as_current_observation(as_type="agent", name="mail"):
            for prompt, reply in calls:
                with client.start_as_current_observation(
                    as_type="generation",
                    name="agent",
                    model="email-agent@0",
                    input=prompt and {"messages": prompt},
                    output=reply,
                ):
                    pass
        client.flush()
        found = langfuse_runs(limit=1)
    assert found.notes == ["1 calls are no chat; their actions are not counted."]
    actions = {one.action: one.count for one in analyze(found.runs).actions}
    assert actions == {"search": 1, "(answer)": 1}
