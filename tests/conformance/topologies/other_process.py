"""A thread gone on with in a process of its own: ``python -m … THREADS THREAD POLICY BASE_URL``.

Resumes `durable`, whose thread another process began and left waiting, and prints the trajectory.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import MessagesState
from langgraph.types import Command

from langchain_art import capture
from tests.conformance.suite.cases.interrupts import careful
from tests.conformance.suite.harness import Kit, Served
from tests.conformance.suite.nodes import line


def durable(kit: Kit, saver: SqliteSaver) -> Any:
    """An agent whose thread outlives its process: it asks a person between its calls."""
    graph = line(MessagesState, early=kit.node(), careful=careful(kit, "sure?"), late=kit.node())
    return graph.compile(checkpointer=saver)


def main(threads: str, thread: str, policy: str, base_url: str) -> None:
    kit = Kit(Served(base_url, policy), "invoke", 1, thread=thread, threaded=True)
    with capture() as run, SqliteSaver.from_conn_string(threads) as saver:
        durable(kit, saver).invoke(Command(resume="yes"), cast(Any, kit.config))
    sys.stdout.write(run.trajectory().model_dump_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
