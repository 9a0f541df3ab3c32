"""LangSmith's SDK reads a project: its root runs page by page, and the model calls below them."""

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from langchain_art.cli.main import app
from langchain_art.errors import ConfigError, ServerUnreachable
from langchain_art.traces.from_langsmith import read_langsmith
from tests.support.json_server import JsonServer

PROJECT, USER = str(uuid.uuid4()), {"role": "user", "content": "When?"}
ANSWER = {"role": "assistant", "content": "In May."}


class LangSmith(JsonServer):
    """The project ``mails``: two traces, each of a root and a call; and a call without a root."""

    def answer(self, path: str, body: Any) -> Any:
        """Pages of one run."""
        where = path.partition("?")[0].removeprefix("/api/v1").removeprefix("/api")
        if where == "/info":
            return {"version": "0.16.2"}
        if where == "/v1/sessions" or where == "/sessions":
            known = {"id": PROJECT, "tenant_id": PROJECT, "reference_dataset_id": None}
            return [known | {"name": "mails"}] if "name=mails" in path else []
        if where == "/v2/runs/query":
            assert body["project_ids"] == [PROJECT]
            runs = self.roots() if body.get("is_root") else self.calls()
            since = body.get("min_start_time", "2100")  # by default LangSmith gives the last day
            runs = [one for one in runs if one["start_time"] >= since]
            at = int(body.get("cursor") or 0)
            more = {"next_cursor": str(at + 1)} if at + 1 < len(runs) else {}
            return {"items": runs[at : at + 1], **more}
        return super().answer(path, body)

    def roots(self) -> list[dict[str, Any]]:
        return [
            {
                "id": f"root-{n}",
                "trace_id": f"t-{n}",
                "run_type": "CHAIN",
                "start_time": f"2026-11-20T10:0{n}:00Z",
                "inputs": {"q": n},
                "outputs": {"a": n},
                "feedback_stats": {"human_reward": {"n": 1, "avg": n / 2}},
            }
            for n in (2, 1)
        ]

    def calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call-{n}",
                "trace_id": f"t-{n}",
                "parent_run_ids": [f"root-{n}"],
                "run_type": "LLM",
                "start_time": f"2026-11-20T10:0{n}:01Z",
                "inputs": {"messages": [USER]},
                "outputs": {"message": ANSWER},
            }
            for n in (3, 2, 1)
        ]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_API_KEY", "lsv2_test")


def test_a_project_is_read_as_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    with LangSmith() as server:
        monkeypatch.setenv("LANGSMITH_ENDPOINT", server.url)
        read = read_langsmith("mails")
        assert [(one.id, one.input, one.score) for one in read.traces] == [
            ("t-2", {"q": 2}, 1.0),
            ("t-1", {"q": 1}, 0.5),
        ]
        assert all([call.reply for call in one.calls] == [ANSWER] for one in read.traces)
        assert len(read_langsmith("mails", limit=1).traces) == 1
        since = datetime(2026, 11, 20, 10, 2, tzinfo=UTC)
        assert [one.id for one in read_langsmith("mails", since).traces] == ["t-2"]
        with pytest.raises(ConfigError, match="the project 'nobody'"):
            read_langsmith("nobody")
    with pytest.raises(ServerUnreachable, match="LangSmith gave no answer"):
        read_langsmith("mails")


def test_options_of_another_store_are_refused() -> None:
    for words in (
        ["langsmith"],
        ["langfuse", "--project", "mails"],
        ["langsmith", "--project", "mails", "--environment", "production"],
        ["file.jsonl", "--since", "2026-11-01"],
    ):
        with pytest.raises(ConfigError, match=r"--project|no use for it"):
            app(["traces", "import", *words], standalone_mode=False)
