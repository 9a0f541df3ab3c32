from typing import Any

from langchain_art.export.records import ExportedRun, Labels
from langchain_art.export.run_spans import spans_of_turns
from langchain_art.wire import Trajectory, Turn, Usage

SECRET = "sk-abcdefghijklmnopqrstuvwxyz"


def exported(name: str = "run-1", **labels: Any) -> ExportedRun:
    """A run of two calls of a node; the second continues the first."""
    asked = {"role": "user", "content": f"When? My key is {SECRET}"}
    calls = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    turns = (
        Turn(
            call_id=f"{name}-a",
            node="writer",
            path=("writer",),
            namespace="writer:1",
            model="mail@3",
            messages=(asked,),
            tools=({"type": "function", "function": {"name": "search"}},),
            reply={"role": "assistant", "content": None, "tool_calls": [calls]},
            usage=Usage(prompt_tokens=7, completion_tokens=2),
            started_at=1_790_000_000.0,
            latency=0.5,
            reward=0.25,
        ),
        Turn(
            call_id=f"{name}-b",
            node="writer",
            path=("writer",),
            namespace="writer:2",
            model="mail@3",
            extends=0,
            messages=({"role": "tool", "tool_call_id": "c", "content": "Monday"},),
            reply={"role": "assistant", "content": "On Monday."},
            started_at=1_790_000_001.0,
            latency=0.5,
        ),
    )
    trajectory = Trajectory(
        id=name,
        scenario="q-7",
        turns=turns,
        input={"messages": [asked]},
        output={"messages": [asked, {"role": "assistant", "content": "On Monday."}]},
        reward=1.0,
        scores={"ruler": 0.9},
        metadata={"judged": {"ruler": "short and right"}, "password": "hunter22"},
    )
    given: dict[str, Any] = {"name": "mail", "environment": "train", "session": "fit/step-1/g"}
    return ExportedRun(
        trajectory=trajectory,
        spans=spans_of_turns(turns),
        labels=Labels(**given | labels),
        excluded=(None, "calls.frozen"),
        trained_tokens=2,
    )
