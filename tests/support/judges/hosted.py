"""LangSmith's and Langfuse's APIs on loopback, as far as their SDKs need; what is sent is kept."""

from typing import Any
from urllib.parse import parse_qs

from tests.support.json_server import JsonServer

EXAMPLE = "00000000-0000-4000-8000-000000000001"
DATASET = "00000000-0000-4000-8000-0000000000da"
TENANT = "00000000-0000-4000-8000-0000000000ee"
NOW = "2026-01-01T00:00:00+00:00"


def run_id(number: int) -> str:
    return f"00000000-0000-4000-8000-1000000000{number:02}"


class Hosted(JsonServer):
    """One server for both: `outputs` of runs by their experiment's id, its id in `names`."""

    def __init__(
        self,
        outputs: dict[str, list[dict[str, Any]]] | None = None,
        names: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.outputs = outputs or {}
        self.names = names or {}

    def posted(self, path: str) -> list[Any]:
        return [body for seen, body in self.requests if seen.partition("?")[0] == path]

    def answer(self, path: str, body: Any) -> Any:
        path, _, query = path.partition("?")
        asked = parse_qs(query)
        if path == "/info":
            return {"version": "0", "instance_flags": {}}
        if path == "/sessions":
            return [self.session(self.names[name]) for name in asked.get("name", [])]
        if path == "/datasets":
            return [{"id": DATASET, "name": asked["name"][0], "created_at": NOW}]
        if path.startswith("/sessions/"):
            return self.session(path.rpartition("/")[2])
        if path == "/examples":
            asked = {"inputs": {"input": "When is the audit?"}, "outputs": {"answer": "14 March"}}
            return [{"id": EXAMPLE, "dataset_id": DATASET, "created_at": NOW, **asked}]
        if path == "/runs/query":
            (experiment,) = body["session"]
            return {"runs": self.runs(experiment), "cursors": {"next": None}}
        if path == "/datasets/comparative":
            return {**body, "tenant_id": TENANT, "modified_at": NOW, "created_at": NOW}
        return {}

    def session(self, id: str) -> dict[str, Any]:
        known = {"tenant_id": TENANT, "reference_dataset_id": DATASET, "start_time": NOW}
        return {"id": id, "name": id, **known}

    def runs(self, experiment: str) -> list[dict[str, Any]]:
        first = 10 * list(self.outputs).index(experiment)
        known = {"name": "target", "start_time": NOW, "run_type": "chain", "session_id": experiment}
        known |= {"inputs": {"input": "When is the audit?"}, "reference_example_id": EXAMPLE}
        ids = [run_id(first + n) for n in range(len(self.outputs[experiment]))]
        return [
            {"id": id_, "trace_id": id_, "dotted_order": f"20260101T000000000000Z{id_}"}
            | known
            | {"outputs": outputs}
            for id_, outputs in zip(ids, self.outputs[experiment], strict=True)
        ]
