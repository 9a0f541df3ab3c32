"""The spans in a real backend of OpenTelemetry: MLflow reads messages, tools, tokens and types."""

import json
from pathlib import Path

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

from langchain_art import Run, capture
from langchain_art.export import ids
from langchain_art.export.exporter import production_run, push_spool
from langchain_art.export.spool import Spool
from tests.support.graphs import Scripted
from tests.support.mlflow_server import MlflowServer
from tests.support.soak import in_soak


@tool
def search(query: str) -> str:
    """Search the mails."""
    return f"found {query}"


class Unsent:
    """Writes to a spool and sends nothing."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def add(self, run: Run) -> None:
        self._spool.write("unsent", [production_run(run, "mail", ())])


# `test_traces.py` shows the kind of it: the same spans by OTLP, in the stand-in for Langfuse.
@in_soak
@pytest.mark.slow
def test_mlflow_has_the_run_with_its_calls_and_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = {"name": "search", "args": {"query": "falcon"}, "id": "c1", "type": "tool_call"}
    usage = {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9}
    first = AIMessage("", tool_calls=[asks], usage_metadata=usage)
    agent = create_agent(Scripted(lines=[first, "On Monday."]), [search])
    spool = Spool(tmp_path / "spool")
    # What an Exporter does when the run has ended, without its limit in time.
    with capture(scenario="q-7", export=Unsent(spool)) as run:
        agent.invoke({"messages": [("user", "When?")]})
        run.reward = 1.0
    with MlflowServer(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        while push_spool(spool.folder, "otlp").left:  # its first answer takes a busy machine long
            pass
        (spans,) = server.traces()
    root, *others = (
        {key: json.loads(v) for key, v in span["attributes"].items()} for span in spans
    )
    assert [span["name"] for span in spans] == [
        "mail",
        *["model"] * 2,
        "tools",
        "search",
        *["model"] * 2,
    ]
    kinds = [one.get("mlflow.spanType") for one in (root, *others)]
    assert kinds == ["AGENT", None, "CHAT_MODEL", None, "TOOL", None, "CHAT_MODEL"]
    assert root["mlflow.traceRequestId"] == f"tr-{ids.trace_id(run.id)}"
    assert root["mlflow.spanOutputs"] == {
        "messages": [{"role": "assistant", "content": "On Monday."}]
    }
    assert len(spans[0]["events"]) == 1  # the reward
    first_call, found, last = others[1], others[3], others[5]
    assert first_call["mlflow.chat.tokenUsage"] == usage
    assert first_call["mlflow.chat.tools"][0]["function"]["name"] == "search"
    assert (found["mlflow.spanInputs"], found["mlflow.spanOutputs"]) == (
        asks["args"],
        "found falcon",
    )
    assert [one["role"] for one in last["mlflow.spanInputs"]] == ["user", "assistant", "tool"]
    (said,) = last["mlflow.spanOutputs"]
    assert said == {"role": "assistant", "parts": [{"type": "text", "content": "On Monday."}]}
