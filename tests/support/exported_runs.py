"""Runs as traces in Langfuse, as users export them: what `review` and `traces` read."""

import tempfile
from collections.abc import Sequence

from langchain_art import Exporter, Trajectory
from langchain_art.export.ids import trace_id, turn_observation_id
from tests.support.langfuse_server import LangfuseServer


def export(server: LangfuseServer, runs: Sequence[Trajectory]) -> dict[str, tuple[str, list[str]]]:
    """Export runs to the server that the environment leads to, and wait until it has them.

    Returns:
        By run the trace's id, and the ids of the observations that its calls are.
    """
    with tempfile.TemporaryDirectory() as spool, Exporter("langfuse", spool=spool) as exporter:
        for run in runs:
            exporter.add(run)
        outcome = exporter.close()
    found = {
        run.id: (
            trace_id(run.id),
            [turn_observation_id(run.id, turn, index) for index, turn in enumerate(run.turns)],
        )
        for run in runs
    }
    sent = {(span.trace_id, span.id) for span in server.spans}
    for trace, calls in found.values():
        assert {(trace, call) for call in calls} <= sent, outcome
    return found
