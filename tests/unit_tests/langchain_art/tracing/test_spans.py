"""Sub-agents around a question to a person: what LangGraph runs anew counts once."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt

from langchain_art import capture
from tests.support.graphs import ASK, Scripted, graph_of, node

Saver = bool | None
"""Of a sub-agent: None keeps its steps in the memory of the graph around it, False keeps none."""


def sub_agent(letter: str, saver: Saver = None) -> Callable[[], str]:
    """A graph that makes two calls; a1, a2, and if it is run anew, a3, a4."""
    model = Scripted(lines=[f"{letter}{number}" for number in range(1, 9)])
    graph = graph_of(draft=node(model), model=node(model)).compile(checkpointer=saver)
    return lambda: graph.invoke(ASK)["messages"][-1].text


def alone(work: Any) -> Any:
    """A graph of one node that does some work."""
    return graph_of(work=lambda state: {"messages": [("ai", work())]}).compile(InMemorySaver())


def calls(*tools: Any) -> Any:
    """A graph that calls tools, all in one task."""
    asks = [{"name": one.name, "args": {}, "id": one.name} for one in tools]
    plan = AIMessage("", tool_calls=asks)
    nodes = {"plan": lambda state: {"messages": [plan]}, "tools": ToolNode([*tools])}
    return graph_of(**nodes).compile(InMemorySaver())


def again_and_again() -> Any:
    agent = sub_agent("a")
    return alone(lambda: agent() + agent() + interrupt("?") + agent() + interrupt("!") + agent())


def two_of_which_one_has_no_memory() -> Any:
    first, second = sub_agent("a"), sub_agent("b", False)
    return alone(lambda: first() + second() + interrupt("?") + first())


def two_in_one_tool_node(saver: Saver) -> Any:
    first, second = sub_agent("a", saver), sub_agent("b", saver)

    @tool
    def one() -> str:
        """Ask one."""
        return first()

    @tool
    def other() -> str:
        """Ask the other."""
        return interrupt("?") + second()

    return calls(one, other)


def tasks_of_a_flow_in_a_node() -> Any:
    agents = {"a": sub_agent("a"), "b": sub_agent("b")}

    @task
    def ask(letter: str) -> str:
        return agents[letter]()

    flow = entrypoint()(lambda given: ask("a").result() + interrupt("?") + ask("b").result())
    return alone(lambda: flow.invoke("go"))


def one_that_asks_itself() -> Any:
    model, second = Scripted(lines=[f"a{number}" for number in range(1, 9)]), sub_agent("b")

    def asks(state: Any) -> Any:
        model.invoke("before")
        return {"messages": [("ai", interrupt("?"))]}

    inner = graph_of(draft=node(model), asks=asks, model=node(model)).compile()
    return alone(lambda: inner.invoke(ASK)["messages"][-1].text + second())


@pytest.mark.parametrize(
    ("make", "counting"),
    [
        (again_and_again, "a1 a2 a3 a4 a5 a6 a7 a8"),
        (two_of_which_one_has_no_memory, "a1 a2 b3 b4 a3 a4"),
        (lambda: two_in_one_tool_node(None), "a1 a2 b1 b2"),
        (lambda: two_in_one_tool_node(False), "a3 a4 b1 b2"),
        (tasks_of_a_flow_in_a_node, "a1 a2 b1 b2"),
        (one_that_asks_itself, "a1 a3 a4 b1 b2"),
    ],
)
def test_what_counts_of_sub_agents_around_a_question(make: Any, counting: str) -> None:
    agent, config = make(), {"configurable": {"thread_id": "1"}}
    with capture() as run:
        agent.invoke(ASK, config)
        while waiting := agent.get_state(config).interrupts:
            agent.invoke(Command(resume={one.id: "yes" for one in waiting}), config)
    assert run.status == "completed"
    counted = {turn.reply["content"] for turn in run.turns if turn.excluded_because is None}
    assert counted == {*counting.split()}
