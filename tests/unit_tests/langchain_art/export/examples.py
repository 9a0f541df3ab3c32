from typing import Any

from langchain_art.export.records import ExportedRun, Labels
from langchain_art.export.run_spans import spans_of_turns
from langchain_art.wire import Trajectory, Turn, Usage

PARAMETERS: dict[str, Any] = {"temperature": 0.5, "max_tokens": 4, "stop": ["\n"]}
SECRET = "sk-abcdefghijklmnopqrstuvwxyz"


def exported(name: str = "run-1", **labels: Any) -> ExportedRun:
    """A run of two calls of a node; the second continues the first."""
    asked = {"role": "user", "content": f"When? My key is {SECRET}"}
    calls = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    writer: dict[str, Any] = {"node": "writer", "path": ("writer",), "model": "mail@3"}
    writer["latency"] = 0.5
    turns = (
        Turn(
            call_id=f"{name}-a",
            namespace="writer:1",
            messages=(asked,),
            tools=({"type": "function", "function": {"name": "search"}},),
            reply={"role": "assistant", "content": None, "tool_calls": [calls]},
            usage=Usage(prompt_tokens=7, completion_tokens=2),
            started_at=1_790_000_000.0,
            reward=0.25,
            **writer,
        ),
        Turn(
            call_id=f"{name}-b",
            namespace="writer:2",
            extends=0,
            messages=({"role": "tool", "tool_call_id": "c", "content": "Monday"},),
            reply={"role": "assistant", "content": "On Monday."},
            started_at=1_790_000_001.0,
            **writer,
        ),
    )
    state = {"messages": [asked, {"role": "assistant", "content": "On Monday."}]}
    trajectory = Trajectory(
        id=name,
        scenario="q-7",
        turns=turns,
        input={"messages": [asked]},
        output=state,
        reward=1.0,
        scores={"ruler": 0.9},
        metadata={"judged": {"ruler": "short and right"}, "password": "hunter22"},
    )
    given: dict[str, Any] = {"name": "mail", "environment": "train", "session": "fit/step-1/g"}
    return ExportedRun(
        trajectory=trajectory,
        spans=tuple(
            span.model_copy(update={"parameters": PARAMETERS}) if span.turn == 0 else span
            for span in spans_of_turns(turns)
        ),
        labels=Labels(**given | labels),
        excluded=(None, "calls.frozen"),
        trained_tokens=2,
    )
