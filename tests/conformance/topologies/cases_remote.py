"""Graphs that LangGraph's own server runs, in a process that captures nothing.

Whoever starts such a graph names the trajectory in the config's metadata (`call_tags`); the server
puts the trajectory together from the calls that were tagged.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from langgraph.pregel.remote import RemoteGraph

from tests.conformance.suite.cases.nesting import chain
from tests.conformance.suite.harness import Expect, Kit, Program, topology
from tests.conformance.suite.tools import LOOK
from tests.support.environments import environment
from tests.support.live_server import REPO, free_port

#: Apart from the rest, because LangGraph's server holds back other packages.
PACKAGES = [
    "langgraph-cli[inmem]>=0.4,<1",
    "langchain>=1.2,<2",
    "langchain-openai>=1.3,<2",
    "httptools>=0.6.4,<1",
]


@cache
def deployment(art_url: str) -> str:
    """Starts LangGraph's local server with `deployed.agent`; its address."""
    python = environment("langgraph", PACKAGES)
    home = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    shutil.copy(Path(__file__).parent / "deployed.py", home)
    graphs = {"dependencies": ["."], "graphs": {"agent": "./deployed.py:agent"}}
    (home / "langgraph.json").write_text(json.dumps(graphs))
    port = free_port()
    argv = [str(python.parent / "langgraph"), "dev", "--no-browser", "--no-reload"]
    env = os.environ | {"ART_BASE_URL": art_url, "PYTHONPATH": str(REPO)}
    env |= {"LANGGRAPH_CLI_NO_ANALYTICS": "1", "LANGSMITH_TRACING": "false"}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [*argv, "--port", str(port)], cwd=home, env=env, stdout=log, stderr=log
        )
    atexit.register(process.terminate)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ok").is_success:
                return f"http://127.0.0.1:{port}"
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError(f"LangGraph's server did not start: {(home / 'log').read_text()[-4000:]}")


def named(kit: Kit) -> dict[str, Any]:
    """A config that says which trajectory the calls belong to."""
    metadata = {"art_trajectory_id": kit.handler.run.id, "art_scenario": "remote"}
    return kit.config | {"metadata": metadata, "tags": ["mine"]}


@topology(
    "a graph on LangGraph's server",
    *Expect.turns("model", "look", "a door", tags=("mine",)),
    heard="server",
    threaded=True,
    remark="RemoteGraph; tagged through metadata, put together by the server",
)
def remote(kit: Kit) -> Program:
    agent = RemoteGraph("agent", url=deployment(kit.served.base_url))
    yield kit.run(agent, kit.ask(LOOK, "a door"), named(kit))


@topology(
    "a remote graph as a node",
    Expect("plan", "think", step=1, tags=("mine",)),
    *Expect.turns("model", "look", "a door", tags=("mine",)),
    Expect("check", "fine", step=3, tags=("mine",)),
    heard="server",
    threaded=True,
)
def remote_node(kit: Kit) -> Program:
    agent = RemoteGraph("agent", url=deployment(kit.served.base_url))
    graph = chain(plan=kit.node(), agent=agent, check=kit.node()).compile()
    yield kit.run(graph, kit.ask("think", LOOK, "a door", "fine"), named(kit))
