"""What a run came to, and which calls count, when graphs fail, wait, and are gone on with."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt
from packaging.version import Version

from langchain_art import CaptureHandler, capture
from langchain_art.tracing.run import Run

ASK: Any = {"messages": [("user", "hi")]}
THREAD: Any = {"configurable": {"thread_id": "t"}}


def says(*lines: str) -> Any:
    """A node whose model says these lines, one per call."""
    model = FakeListChatModel(responses=list(lines))
    return lambda state: {"messages": [model.invoke(state["messages"])]}


def line(saver: Any = None, stop: list[str] | None = None, **nodes: Any) -> Any:
    graph = StateGraph(MessagesState).add_sequence(list(nodes.items()))
    graph.add_edge(START, next(iter(nodes)))
    return graph.compile(checkpointer=saver, interrupt_before=stop)


def asking(*lines: str) -> Any:
    """A node that asks a person after its call."""
    said = says(*lines)

    def node(state: Any) -> Any:
        update = said(state)
        interrupt("sure?")
        return update

    return node


def failing(state: Any) -> None:
    raise ValueError("no")


def told(run: Run) -> list[tuple[Any, str | None]]:
    return [(turn.reply and turn.reply["content"], turn.excluded_because) for turn in run.turns]


# ---- what the run came to


MERGES = Version(version("langgraph")) >= Version("1.2.3")
"""Whether a config with callbacks adds to those around it, or replaces them."""


@pytest.mark.parametrize("config", [{}, {"callbacks": [BaseCallbackHandler()]}][: 1 + MERGES])
def test_a_scope_hears_that_a_graph_stops_where_it_was_told_to(config: Any) -> None:
    agent = line(InMemorySaver(), ["act"], plan=says("p"), act=says("a"))
    with capture() as run:
        agent.invoke(ASK, THREAD | config)
        assert run.status == "interrupted"
        agent.invoke(None, THREAD | config)
    assert run.status == "completed"
    assert told(run) == [("p", None), ("a", None)]


def test_nested_scopes_both_hear_that_a_graph_stops() -> None:
    agent = line(InMemorySaver(), ["act"], plan=says("p"), act=says("a"))
    with capture() as outer, capture() as inner:
        agent.invoke(ASK, THREAD)
    assert (outer.status, inner.status) == ("interrupted", "interrupted")


def test_a_chain_waits_with_its_graph() -> None:
    waits: Runnable[Any, Any] = RunnableLambda(lambda ask: ask) | line(
        InMemorySaver(), asks=asking("x")
    )
    with capture() as run:
        waits.invoke(ASK, THREAD)
    assert run.status == "interrupted"


def test_a_node_goes_on_while_a_graph_of_its_own_waits() -> None:
    inner = line(InMemorySaver(), asks=asking("x"))

    def asks(state: Any) -> None:
        assert "__interrupt__" in inner.invoke(state, THREAD)

    with capture() as run:
        line(asks=asks, goes_on=says("y")).invoke(ASK)
    assert run.status == "completed"
    assert told(run) == [("x", None), ("y", None)]


@pytest.mark.parametrize("first", ["bad", "good"])
def test_a_failure_is_not_undone_by_what_ran_beside_it(first: str) -> None:
    begun, first_is_over = threading.Barrier(2, timeout=10), threading.Event()

    def node(state: Any) -> Any:
        text = state["messages"][-1].text
        begun.wait()
        if text != first:
            first_is_over.wait(10)
        return failing(state) if text == "bad" else {}

    run, agent = Run(), line(n=node)

    def invoke(text: str) -> None:
        try:
            agent.invoke({"messages": [("user", text)]}, {"callbacks": [CaptureHandler(run)]})
        except ValueError:
            assert text == "bad"
        first_is_over.set()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(invoke, ["bad", "good"]))
    assert (run.status, run.error) == ("failed", "ValueError: no")


# ---- which calls count


def test_what_a_failed_graph_said_does_not_count_if_another_followed() -> None:
    with capture() as run:
        with pytest.raises(ValueError, match="no"):
            line(a=says("x"), b=failing).invoke(ASK)
        assert told(run) == [("x", None)]
        line(a=says("y")).invoke(ASK)
    assert (run.status, run.error) == ("completed", None)
    assert told(run) == [("x", "error"), ("y", None)]


def test_what_a_failed_graph_said_counts_if_its_thread_goes_on() -> None:
    flaky = iter([failing, lambda state: {}])
    agent = line(InMemorySaver(), a=says("x"), b=lambda state: next(flaky)(state), c=says("y"))
    with capture() as run:
        with pytest.raises(ValueError, match="no"):
            agent.invoke(ASK, THREAD)
        agent.invoke(None, THREAD)
    assert told(run) == [("x", None), ("y", None)]


@pytest.mark.parametrize("nested", [False, True])
def test_a_question_that_was_never_answered(nested: bool) -> None:
    """A new input drops the waiting node, and all that its subgraph had done."""
    asks = line(a=says("a", "a2"), b=asking("b", "b2")) if nested else asking("b", "b2")
    done = [("a", None), ("b", None)] if nested else [("b", None)]
    agent = line(InMemorySaver(), early=says("e", "e2"), asks=asks)
    with capture() as run:
        agent.invoke(ASK, THREAD)
        assert told(run) == [("e", None), *done]
        agent.invoke({"messages": [("user", "never mind")]}, THREAD)
        assert told(run)[: 1 + len(done)] == [("e", None), *done]  # it may still be answered
        assert run.status == "interrupted"
        agent.invoke(Command(resume="yes"), THREAD)
    assert run.status == "completed"
    excluded = [(text, "interrupted") for text, _ in done]
    assert told(run)[: 1 + len(done)] == [("e", None), *excluded]


# ---- who tells of it


def test_two_handlers_of_one_run_tell_it_once() -> None:
    with capture() as run:
        config: Any = {"callbacks": [CaptureHandler(run)]}
        line(a=says("x"), b=says("y")).invoke(ASK, config)
    assert told(run) == [("x", None), ("y", None)]
    assert [turn.extends for turn in run.turns] == [None, 0]
    assert run.status == "completed"


def test_two_handlers_tell_of_several_replies_once() -> None:
    class Twice(FakeListChatModel):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
            replies = [ChatGeneration(message=AIMessage(text)) for text in self.responses]
            return ChatResult(generations=replies)

    with capture() as run:
        Twice(responses=["x", "y"]).invoke("?", {"callbacks": [CaptureHandler(run)]})
    assert told(run) == [("x", None), ("y", "unchosen")]


def test_another_handler_goes_on_with_a_run() -> None:
    agent = line(InMemorySaver(), asks=asking("x", "y"))
    with capture() as run:
        agent.invoke(ASK, THREAD)
    agent.invoke(Command(resume="yes"), {**THREAD, "callbacks": [CaptureHandler(run)]})
    assert run.status == "completed"
    assert told(run) == [("x", "interrupted"), ("y", None)]


def test_replies_from_elsewhere_are_named() -> None:
    def sampled(id: str) -> AIMessage:
        return AIMessage(id, response_metadata={"call_id": id})

    model = FakeListChatModel(responses=["z"])
    with capture() as run:
        model.invoke([HumanMessage("1"), sampled("a"), HumanMessage("2")])
        model.invoke([sampled("b"), AIMessage("no id"), HumanMessage("3"), sampled("a")])
        line(n=lambda state: {"messages": [sampled("c")]}).invoke(ASK)
    trajectory = run.trajectory()
    assert trajectory.metadata == {"sampled_elsewhere": ["a", "b", "c"]}
    assert run.metadata == {}


# ---- the scope itself


def test_a_scope_leaves_the_config_as_it_was() -> None:
    with capture():
        with capture():
            pass
        outer = var_child_runnable_config.get()
        assert outer is not None
        assert len(outer.get("callbacks") or []) == 1
    assert var_child_runnable_config.get() is None


def test_a_scope_adds_to_a_config_that_is_there() -> None:
    token = var_child_runnable_config.set({"tags": ["mine"], "callbacks": None})
    with capture():
        assert (var_child_runnable_config.get() or {}).get("tags") == ["mine"]
    var_child_runnable_config.reset(token)


def test_a_scope_inside_of_a_node_leaves_the_nodes_config_alone() -> None:
    def node(state: Any) -> None:
        before = var_child_runnable_config.get()
        with capture():
            assert var_child_runnable_config.get() is before

    line(n=node).invoke(ASK)


def test_the_path_of_a_graph_on_a_thread_of_its_own() -> None:
    """LangGraph begins its namespace anew, so the node around it is known by its frames alone."""
    inner = line(InMemorySaver(), deep=says("x", "y"))
    team = line(asks=lambda state: inner.invoke(state, THREAD))
    with capture() as run:
        line(team=team).invoke(ASK)
        inner.invoke(ASK, THREAD)
    assert [turn.path for turn in run.turns] == [("team", "asks", "deep"), ("deep",)]
    assert [turn.thread for turn in run.turns] == ["t", "t"]
