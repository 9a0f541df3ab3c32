"""A captured run of a graph that has a bit of everything: what a time line is to show."""

import threading
import uuid
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt

from langchain_art import capture
from langchain_art.chat_models.chat_art import ChatART
from langchain_art.wire import Trajectory
from tests.support.graphs import ASK, RETRY, Flaky, Scripted, graph_of, node
from tests.support.live_server import LiveServer


class AtOnce(Scripted):
    """Its two calls run at the same time, whatever else the machine does."""

    meet: Any

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        self.meet.wait(60)
        return super()._generate(messages, *args, **kwargs)


@tool
def search(query: str) -> str:
    """Search."""
    return "Ann wrote on Monday."


def drawn_run(server: LiveServer, tokens: int = 3, scenario: str | None = None) -> Trajectory:
    """A run with a subgraph, attempts, two branches at once, a tool, and an interrupt."""
    writer = node(ChatART(model=server.policy, base_url=server.base_url, max_tokens=tokens))
    team = StateGraph(MessagesState)
    team.add_node("writer", Flaky(writer), retry_policy=RETRY)
    team.add_edge(START, "writer")
    call = {"name": "search", "args": {"query": "Ann"}, "id": "1"}
    finds = Scripted(lines=[AIMessage("", tool_calls=[call]), "On Monday."])
    branch = node(AtOnce(lines=["so", "thus"], meet=threading.Barrier(2)))
    graph: Any = graph_of(team=team.compile())
    for name in ("left", "right"):
        graph.add_node(name, branch)
        graph.add_edge("team", name)
    graph.add_node("helper", create_agent(finds, [search]))
    graph.add_edge(["left", "right"], "helper")
    graph.add_node("person", lambda state: interrupt("Is it right?"))
    graph.add_edge("helper", "person")
    with capture(scenario=scenario or f"drawn-{uuid.uuid4().hex}") as run:
        config: Any = {"configurable": {"thread_id": "1"}}
        graph.compile(checkpointer=MemorySaver()).invoke(ASK, config)
    return run.trajectory()
