"""What the capture handler makes of graphs of every shape, driven by scripted foreign models.

Where a call must reach our server (ids, tags), it does; where only the graph's shape matters, the
model is a fake that says what the test wants.
"""

from __future__ import annotations

import asyncio
import math
import operator
import threading
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from langchain_art import CaptureHandler, Trajectory, Turn, capture
from langchain_art.errors import ConfigError
from tests.support.graphs import ASK, RETRY, Flaky, Scripted, graph_of, node


def calls(name: str, *ids: str, **args: Any) -> AIMessage:
    return AIMessage(
        "", tool_calls=[{"name": name, "args": args, "id": i, "type": "tool_call"} for i in ids]
    )


def said(turn: Turn) -> Any:
    assert turn.reply is not None
    return turn.reply["content"]


@tool
def look(what: str = "") -> str:
    """Look at something."""
    return f"seen {what}"


def lived(run: Any) -> list[Turn]:
    return [turn for turn in run.turns if turn.excluded_because is None]


# ---- the run


def test_a_run_starts_unscored_and_refuses_what_is_no_number() -> None:
    with capture(scenario="q", metadata={"seed": 1}) as run:
        assert run.reward is None
        for bad in (math.nan, math.inf, "many"):
            with pytest.raises(ConfigError, match="reward"):
                run.reward = bad  # type: ignore[assignment]
        run.reward = True
    trajectory = run.trajectory()
    assert isinstance(trajectory, Trajectory)
    assert (trajectory.reward, trajectory.scenario, trajectory.status) == (1.0, "q", "completed")
    assert trajectory.metadata["seed"] == run.metadata["seed"] == 1
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


def test_ids() -> None:
    with capture() as one, capture() as other:
        assert one.id != other.id
        assert len(one.id) == 32
    with pytest.raises(ConfigError, match="trajectory_id"):
        capture(id="no spaces")
    scope = capture(id="mine")
    with scope as run:
        assert run.id == "mine"
    with pytest.raises(ConfigError), scope:
        pass


def test_input_output_and_a_failed_run() -> None:
    graph = graph_of(a=node(Scripted(lines=["one"]))).compile()
    with capture() as run:
        graph.invoke(ASK)
    assert run.trajectory().output["messages"][1]["content"] == "one"
    assert run.trajectory().input["messages"] == [["user", "hi"]]

    def broken(state: MessagesState) -> None:
        raise KeyError("no")

    with pytest.raises(KeyError), capture() as run:
        graph_of(a=node(Scripted(lines=["one"])), b=broken).compile().invoke(ASK)
    assert (run.status, run.error) == ("failed", "KeyError: 'no'")
    assert [turn.excluded_because for turn in run.turns] == [None]  # it may still earn a bad reward


def test_too_many_steps_is_truncated() -> None:
    graph = StateGraph(MessagesState).add_node("a", node(Scripted(lines=["x"])))
    graph.add_edge(START, "a").add_edge("a", "a")
    with pytest.raises(GraphRecursionError), capture() as run:
        graph.compile().invoke(ASK, {"recursion_limit": 3})
    assert run.status == "truncated"
    assert len(lived(run)) == 3
    with capture() as run, pytest.raises(GraphRecursionError):
        graph.compile().invoke(ASK, {"recursion_limit": 3})
    assert run.status == "truncated"


# ---- shapes


async def test_a_tool_agent_on_four_paths() -> None:
    def agent() -> Any:
        lines = [calls("look", "c1", what="door"), "a door"]
        return create_agent(Scripted(lines=lines), [look], system_prompt="Look.")

    with capture() as invoked:
        agent().invoke(ASK)
    with capture() as streamed:
        list(agent().stream(ASK, stream_mode=["messages", "updates"]))
    async with capture() as ainvoked:
        await agent().ainvoke(ASK)
    async with capture() as astreamed:
        [event async for event in agent().astream_events(ASK, version="v2")]
    for run in (invoked, streamed, ainvoked, astreamed):
        first, second = run.turns
        assert (first.node, first.path, first.step) == ("model", ("model",), 1)
        assert (second.node, second.step) == ("model", 3)
        assert first.namespace != second.namespace
        assert [m["role"] for m in first.messages] == ["system", "user"]
        assert second.extends == 0
        assert [m["role"] for m in second.messages] == ["tool"]
        assert first.reply is not None
        assert first.reply["tool_calls"][0]["function"]["name"] == "look"
        assert first.tools[0]["function"]["name"] == "look"
        assert not first.ours
        assert second.latency is not None
        assert [m["role"] for m in run.trajectory().prompt(1)] == [
            "system",
            "user",
            "assistant",
            "tool",
        ]


def test_a_named_agents_signature_does_not_break_the_chain() -> None:
    lines = [calls("look", "c1"), calls("look", "c2"), "done"]
    with capture() as run:
        create_agent(Scripted(lines=lines), [look], name="scout").invoke(ASK)
    assert [turn.extends for turn in run.turns] == [None, 0, 1]
    assert run.turns[0].reply is not None
    assert run.turns[0].reply["name"] == "scout"


def test_subgraphs_have_paths() -> None:
    inner = graph_of(inner=node(Scripted(lines=["deep"]))).compile()
    called = graph_of(called=node(Scripted(lines=["called"]))).compile()
    outer = graph_of(sub=inner, caller=lambda state: called.invoke(state)).compile()
    with capture() as run:
        outer.invoke(ASK)
    assert [turn.path for turn in run.turns] == [("sub", "inner"), ("caller", "called")]
    assert [turn.node for turn in run.turns] == ["inner", "called"]
    assert [turn.extends for turn in run.turns] == [None, 0]


def test_one_node_may_call_a_subgraph_twice() -> None:
    called = graph_of(called=node(Scripted(lines=["x", "y", "z"]))).compile()

    def twice(state: MessagesState) -> Any:
        called.invoke(state)
        return called.invoke(state)

    with capture() as run:
        graph_of(caller=twice).compile().invoke(ASK)
    assert [turn.path for turn in lived(run)] == [("caller", "called")] * 2


class Fan(TypedDict):
    words: Annotated[list[str], operator.add]


def fan(models: dict[str, BaseChatModel]) -> Any:
    def worker(word: Any) -> Fan:
        first = models[word].invoke([HumanMessage(word)])
        second = models[word].invoke([HumanMessage(word), first, HumanMessage("more")])
        return {"words": [str(second.content)]}

    graph = StateGraph(Fan).add_node("split", lambda state: {"words": []})
    graph.add_node("worker", worker).add_edge(START, "split")
    graph.add_conditional_edges("split", lambda s: [Send("worker", word) for word in models])
    return graph.compile()


async def test_parallel_branches_are_told_apart() -> None:
    for asynchronous in (False, True):
        graph = fan({word: Scripted(lines=[f"{word}1", f"{word}2"]) for word in "abc"})
        with capture() as run:
            await graph.ainvoke({"words": []}) if asynchronous else graph.invoke({"words": []})
        assert len({turn.namespace for turn in run.turns}) == 3
        assert {turn.path for turn in run.turns} == {("worker",)}
        for turn in run.turns:
            if turn.extends is not None:
                assert said(run.turns[turn.extends])[0] == said(turn)[0]
                assert run.turns[turn.extends].namespace == turn.namespace
        assert sum(turn.extends is not None for turn in run.turns) == 3


def test_equal_branches_go_on_in_their_own() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def worker(word: Any) -> Fan:
        model = Scripted(lines=["same"])
        first = model.invoke([HumanMessage("same")])
        barrier.wait()
        model.invoke([HumanMessage("same"), first, HumanMessage("more")])
        return {"words": []}

    graph = StateGraph(Fan).add_node("split", lambda state: {"words": []})
    graph.add_node("worker", worker).add_edge(START, "split")
    graph.add_conditional_edges("split", lambda s: [Send("worker", word) for word in "ab"])
    with capture() as run:
        graph.compile().invoke({"words": []})
    second = [turn for turn in run.turns if turn.extends is not None]
    assert len(second) == 2
    for turn in second:
        assert run.turns[turn.extends or 0].namespace == turn.namespace


def test_a_model_inside_a_tool_and_an_agent_inside_a_tool() -> None:
    side, deep = Scripted(lines=["side"]), Scripted(lines=["deep"])

    @tool
    def ask() -> str:
        """Ask."""
        return str(side.invoke("?").content)

    @tool
    def delegate() -> str:
        """Delegate."""
        return create_agent(deep, []).invoke(ASK)["messages"][-1].text

    lines = [calls("ask", "1"), calls("delegate", "2"), "done"]
    with capture() as run:
        create_agent(Scripted(lines=lines), [ask, delegate]).invoke(ASK)
    assert [turn.path for turn in run.turns] == [
        ("model",),
        ("tools",),
        ("model",),
        ("tools", "model"),
        ("model",),
    ]
    assert [turn.extends for turn in run.turns] == [None, None, 0, None, 2]


def test_a_middlewares_own_call_is_labelled() -> None:
    main = Scripted(lines=["long answer"])
    middleware = SummarizationMiddleware(
        Scripted(lines=["summary"]), trigger=("messages", 2), keep=("messages", 1)
    )
    with capture() as run:
        create_agent(main, [], middleware=[middleware]).invoke(
            {"messages": [("user", "a"), ("ai", "b"), ("user", "c")]}
        )
    own, answer = run.turns
    assert own.path[-1] == "summarization"
    assert said(own) == "summary"
    assert answer.path == ("model",)


async def test_threads_gather_and_batch_are_heard() -> None:
    model = Scripted(lines=["x"])

    async def many(state: MessagesState) -> Any:
        await asyncio.gather(*(model.ainvoke([HumanMessage(str(i))]) for i in range(3)))
        await asyncio.to_thread(model.invoke, "thread")
        await asyncio.create_task(model.ainvoke("task"))
        model.batch(["b1", "b2"])
        return {}

    async with capture() as run:
        await graph_of(many=many).compile().ainvoke(ASK)
    assert len(lived(run)) == 7
    assert {turn.node for turn in run.turns} == {"many"}


def test_concurrent_runs_stay_apart() -> None:
    graph = graph_of(a=node(Scripted(lines=["x"])), b=node(Scripted(lines=["y"]))).compile()

    async def one(i: int) -> Any:
        async with capture(scenario=str(i)) as run:
            await graph.ainvoke({"messages": [("user", str(i))]})
        return run

    async def main() -> list[Any]:
        return await asyncio.gather(*(one(i) for i in range(20)))

    for i, run in enumerate(asyncio.run(main())):
        assert [turn.node for turn in run.turns] == ["a", "b"]
        assert run.turns[0].messages[0]["content"] == str(i)


# ---- attempts


@pytest.mark.parametrize("threaded", [False, True])
def test_retried_attempts_are_discarded(threaded: bool) -> None:
    graph = StateGraph(MessagesState)
    graph.add_node("a", Flaky(node(Scripted(lines=["1", "2", "3"]))), retry_policy=RETRY)
    saver = InMemorySaver() if threaded else None
    config: Any = {"configurable": {"thread_id": "t"}} if threaded else {}
    with capture() as run:
        graph.add_edge(START, "a").compile(checkpointer=saver).invoke(ASK, config)
    assert [turn.excluded_because for turn in run.turns] == ["retried", "retried", None]
    assert [turn.attempt for turn in run.turns] == [1, 2, 3]
    assert [said(turn) for turn in run.turns] == ["1", "2", "3"]
    assert run.status == "completed"


@pytest.mark.parametrize("saver", [None, InMemorySaver()])
def test_a_retried_subgraph(saver: Any) -> None:
    flaky = Flaky(node(Scripted(lines=["1", "2", "3"])))
    inner = graph_of(first=node(Scripted(lines=["f"])), second=flaky).compile()
    graph = StateGraph(MessagesState).add_node("sub", inner, retry_policy=RETRY)
    config: Any = {"configurable": {"thread_id": "t"}} if saver else {}
    with capture() as run:
        graph.add_edge(START, "sub").compile(checkpointer=saver).invoke(ASK, config)
    assert [said(turn) for turn in lived(run)] == ["f", "3"]
    assert {turn.excluded_because for turn in run.turns} == {None, "retried"}


def test_an_interrupted_attempt_that_ran_again_is_discarded() -> None:
    def careful(state: MessagesState) -> Any:
        reply = model.invoke(state["messages"])
        return {"messages": [reply, HumanMessage(interrupt("sure?"))]}

    model = Scripted(lines=["before", "after"])
    graph = graph_of(early=node(Scripted(lines=["e"])), careful=careful)
    agent = graph.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    with capture() as run:
        agent.invoke(ASK, config)
        assert run.status == "interrupted"
        assert [turn.excluded_because for turn in run.turns] == [None, None]
        agent.invoke(Command(resume="yes"), config)
    assert run.status == "completed"
    assert [turn.excluded_because for turn in run.turns] == [None, "interrupted", None]
    assert {turn.thread for turn in run.turns} == {"t"}
    assert run.trajectory().input["messages"] == [["user", "hi"]]


def test_a_static_interrupt_is_one_too() -> None:
    graph = graph_of(a=node(Scripted(lines=["x"])), b=node(Scripted(lines=["y"])))
    agent = graph.compile(checkpointer=InMemorySaver(), interrupt_before=["b"])
    handler = CaptureHandler()
    config: Any = {"configurable": {"thread_id": "t"}, "callbacks": [handler]}
    agent.invoke(ASK, config)
    assert handler.run.status == "interrupted"
    agent.invoke(None, config)
    assert handler.run.status == "completed"
    assert [turn.excluded_because for turn in handler.run.turns] == [None, None]
    assert [turn.extends for turn in handler.run.turns] == [None, 0]


def test_a_failed_thread_goes_on_where_it_stopped() -> None:
    flaky = Flaky(node(Scripted(lines=["1", "2", "3"])))
    inner = graph_of(first=node(Scripted(lines=["f"])), second=flaky).compile()
    agent = graph_of(sub=inner).compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    with capture() as run:
        for state in (ASK, None):
            with pytest.raises(ConnectionError):
                agent.invoke(state, config)
        agent.invoke(None, config)
    assert [said(turn) for turn in lived(run)] == ["f", "3"]
    assert run.status == "completed"


def test_an_interrupted_subgraph_keeps_what_was_not_run_again() -> None:
    def careful(state: MessagesState) -> Any:
        reply = model.invoke(state["messages"])
        return {"messages": [reply, HumanMessage(interrupt("sure?"))]}

    model = Scripted(lines=["before", "after"])
    inner = graph_of(early=node(Scripted(lines=["e"])), careful=careful).compile()
    agent = graph_of(sub=inner).compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    with capture() as run:
        agent.invoke(ASK, config)
        agent.invoke(Command(resume="yes"), config)
    assert [said(turn) for turn in lived(run)] == ["e", "after"]


def test_several_turns_of_one_thread_go_on() -> None:
    agent = create_agent(Scripted(lines=["1", "2"]), [], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    with capture() as run:
        agent.invoke(ASK, config)
        agent.invoke({"messages": [("user", "and?")]}, config)
    assert [turn.extends for turn in run.turns] == [None, 0]
    assert [m["content"] for m in run.turns[1].messages] == ["and?"]


def test_fallbacks_retries_and_closed_streams() -> None:
    def parse(message: AIMessage) -> str:
        if message.content == "bad":
            raise ValueError("bad")
        return str(message.content)

    chain = Scripted(lines=["bad", "good"]) | RunnableLambda(parse)
    with capture() as run:
        chain.with_retry(stop_after_attempt=2, wait_exponential_jitter=False).invoke("?")
    assert [turn.excluded_because for turn in run.turns] == ["error", None]
    with capture() as run:
        stream = GenericFakeChatModel(messages=iter([AIMessage("a long answer")])).stream("?")
        next(stream)
        stream.close()
    assert run.turns[0].excluded_because == "error"
    assert run.turns[0].error is not None
    assert "GeneratorExit" in run.turns[0].error


def test_a_handoff_to_the_parent_graph_is_no_failure() -> None:
    def hand(state: MessagesState) -> Any:
        reply = model.invoke(state["messages"])
        return Command(goto="other", graph=Command.PARENT, update={"messages": [reply]})

    model = Scripted(lines=["x"])
    inner = StateGraph(MessagesState).add_node("hand", hand).add_edge(START, "hand").compile()
    graph = StateGraph(MessagesState).add_node("sub", inner)
    graph.add_node("other", node(Scripted(lines=["y"]))).add_edge(START, "sub")
    with capture() as run:
        graph.compile().invoke(ASK)
    assert [turn.excluded_because for turn in run.turns] == [None, None]
    assert run.status == "completed"


# ---- who hears


def test_nested_scopes_both_hear() -> None:
    model = Scripted(lines=["x"])
    with capture() as outer:
        model.invoke("1")
        with capture() as inner:
            model.invoke("2")
            with capture() as innermost:
                model.invoke("3")
        model.invoke("4")
    assert [len(run.turns) for run in (outer, inner, innermost)] == [4, 2, 1]


def test_a_scope_inside_of_a_node() -> None:
    seen: list[Any] = []
    model = Scripted(lines=["x"])

    def inside(state: MessagesState) -> Any:
        with capture() as run:
            model.invoke("1")
            (model | RunnableLambda(lambda m: m)).invoke("2")
            (model | RunnableLambda(lambda m: m)).invoke("3")
        seen.append(run)
        return {}

    with capture() as outer:
        graph_of(inside=inside).compile().invoke(ASK)
    assert len(lived(seen[0])) == len(lived(outer)) == 3


def test_a_handler_in_the_config_only() -> None:
    handler = CaptureHandler()
    graph = graph_of(a=node(Scripted(lines=["x"])), b=node(Scripted(lines=["y"]))).compile()
    graph.invoke(ASK, {"callbacks": [handler]})
    assert [turn.node for turn in handler.run.turns] == ["a", "b"]
    assert handler.run.status == "completed"
    with capture() as run:
        graph.invoke(ASK, {"callbacks": [handler]})
    assert len(run.turns) == 2
    assert len(handler.run.turns) == 4


def test_handlers_in_the_config_hear_a_call_with_callbacks_of_its_own() -> None:
    handlers = [CaptureHandler() for _ in range(3)]
    outer = CaptureHandler()
    model = Scripted(lines=["x"])

    def alone(state: Any) -> Any:
        return {"messages": [model.invoke("a", {"callbacks": [BaseCallbackHandler()]})]}

    inner = graph_of(alone=alone).compile()

    def nested(state: Any) -> Any:
        return inner.invoke(state, {"callbacks": [*handlers, *handlers[:1]]})

    graph_of(nested=nested).compile().invoke(ASK, {"callbacks": [outer]})
    for handler in [*handlers, outer]:
        assert [turn.node for turn in handler.run.turns] == ["alone"]
        assert handler.run.status == "completed"
    model.invoke("b")  # outside of the graph nobody hears
    assert all(len(handler.run.turns) == 1 for handler in [*handlers, outer])


def test_a_broken_payload_harms_no_graph_and_is_no_secret() -> None:
    class Odd(Scripted):
        def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> Any:
            return {"ls_model_name": "odd"}

        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
            reply = AIMessage("x", usage_metadata=None)
            object.__setattr__(reply, "usage_metadata", {"input_tokens": 1})
            return ChatResult(generations=[ChatGeneration(message=reply)])

    with capture() as run:
        assert Odd(lines=[""]).invoke("?").content == "x"
    assert run.error is not None
    assert "on_llm_end" in run.error
    run.trajectory()


def test_odd_messages_become_text() -> None:
    odd = HumanMessage([{"type": "text"}])  # a text block without its text
    with capture() as run:
        Scripted(lines=["x"]).invoke([SystemMessage("s"), odd])
    assert run.turns[0].messages[1]["role"] in ("human", "user")
    run.trajectory().model_dump_json()


# ---- size


def chat_bytes(turns: int) -> int:
    lines = [calls("look", f"c{i}", what="x" * 200) for i in range(turns - 1)]
    agent = create_agent(Scripted(lines=[*lines, "done"]), [look], system_prompt="s" * 500)
    with capture() as run:
        agent.invoke(ASK, {"recursion_limit": 4 * turns})
    trajectory = run.trajectory()
    assert [turn.extends for turn in run.turns] == [None, *range(turns - 1)]
    assert len(trajectory.prompt(turns - 1)) == 2 * turns
    return len(trajectory.model_dump_json())


def test_size_is_linear_in_turns() -> None:
    assert chat_bytes(40) <= 2.1 * chat_bytes(20)
