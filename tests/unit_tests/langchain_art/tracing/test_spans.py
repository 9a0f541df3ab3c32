from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
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


def counting(agent: Any, first: Any = ASK) -> set[str]:
    """Runs an agent, answers whatever it asks, and gives the replies that count."""
    config: Any = {"configurable": {"thread_id": "1"}}
    with capture() as run:
        agent.invoke(first, config)
        while waiting := agent.get_state(config).interrupts:
            agent.invoke(Command(resume={one.id: "yes" for one in waiting}), config)
    assert run.status == "completed"
    return {turn.reply["content"] for turn in run.turns if turn.excluded_because is None}


def alone(work: Any) -> Any:
    """A graph of one node that does some work."""
    return graph_of(work=lambda state: {"messages": [("ai", work())]}).compile(InMemorySaver())


def calls(*tools: Any) -> Any:
    """A graph that calls tools, all in one task."""
    asks = [{"name": one.name, "args": {}, "id": one.name} for one in tools]
    plan = AIMessage("", tool_calls=asks)
    nodes = {"plan": lambda state: {"messages": [plan]}, "tools": ToolNode([*tools])}
    return graph_of(**nodes).compile(InMemorySaver())


def test_one_of_two_sub_agents_has_no_memory() -> None:
    first, second = sub_agent("a"), sub_agent("b", False)
    work = alone(lambda: first() + second() + interrupt("?") + first())
    assert counting(work) == {"a1", "a2", "b3", "b4", "a3", "a4"}


def test_a_sub_agent_that_is_asked_again_and_again() -> None:
    agent = sub_agent("a")
    work = alone(lambda: agent() + agent() + interrupt("?") + agent() + interrupt("!") + agent())
    assert counting(work) == {f"a{number}" for number in range(1, 9)}


def test_two_sub_agents_in_one_tool() -> None:
    first, second = sub_agent("a"), sub_agent("b")

    @tool
    def both() -> str:
        """Ask both."""
        return first() + interrupt("?") + second()

    assert counting(calls(both)) == {"a1", "a2", "b1", "b2"}
    script = [AIMessage("", tool_calls=[{"name": "both", "args": {}, "id": "1"}]), "end"]
    first, second = sub_agent("a"), sub_agent("b")
    agent = create_agent(Scripted(lines=script), [both], checkpointer=InMemorySaver())
    assert counting(agent) == {None, "a1", "a2", "b1", "b2", "end"}


@pytest.mark.parametrize("saver", [None, False])
def test_two_sub_agents_in_one_tool_node(saver: Saver) -> None:
    first, second = sub_agent("a", saver), sub_agent("b", saver)

    @tool
    def one() -> str:
        """Ask one."""
        return first()

    @tool
    def other() -> str:
        """Ask the other."""
        return interrupt("?") + second()

    assert counting(calls(one, other)) == (
        {"a1", "a2", "b1", "b2"} if saver is None else {"a3", "a4", "b1", "b2"}
    )


def test_sub_agents_in_the_functional_api() -> None:
    first, second = sub_agent("a"), sub_agent("b")

    @entrypoint(checkpointer=InMemorySaver())
    def flow(given: Any) -> str:
        return first() + interrupt("?") + second()

    assert counting(flow) == {"a1", "a2", "b1", "b2"}


def kept() -> Any:
    """A flow whose task asks one sub-agent before a question and another after it."""
    agents = {"a": sub_agent("a"), "b": sub_agent("b")}

    @task
    def ask(letter: str) -> str:
        return agents[letter]()

    def flow(given: Any) -> str:
        return ask("a").result() + interrupt("?") + ask("b").result()

    return flow


def test_sub_agents_in_tasks_of_the_functional_api() -> None:
    flow = entrypoint(checkpointer=InMemorySaver())(kept())
    assert counting(flow) == {"a1", "a2", "b1", "b2"}


def test_sub_agents_in_tasks_of_a_flow_in_a_node() -> None:
    flow = entrypoint()(kept())
    assert counting(alone(lambda: flow.invoke("go"))) == {"a1", "a2", "b1", "b2"}


def test_a_sub_agent_that_asks_itself() -> None:
    model = Scripted(lines=[f"a{number}" for number in range(1, 9)])

    def asks(state: Any) -> Any:
        model.invoke("before")
        return {"messages": [("ai", interrupt("?"))]}

    inner = graph_of(draft=node(model), asks=asks, model=node(model)).compile()
    second = sub_agent("b")
    work = alone(lambda: inner.invoke(ASK)["messages"][-1].text + second())
    assert counting(work) == {"a1", "a3", "a4", "b1", "b2"}
