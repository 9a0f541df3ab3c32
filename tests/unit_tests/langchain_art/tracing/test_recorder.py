import asyncio
import gc
import logging
import math
import operator
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from importlib.metadata import version
from multiprocessing import get_context
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt
from packaging.version import Version

from langchain_art import CaptureHandler, Trajectory, capture
from langchain_art.errors import ConfigError
from langchain_art.tracing.run import Run
from langchain_art.wire.identifiers import scenario_id
from tests.support.graphs import Scripted, graph_of

ASK: Any = {"messages": [("user", "hi")]}
THREAD: Any = {"configurable": {"thread_id": "t"}}


def says(*lines: str) -> Any:
    """A node whose model says these lines, one per call."""
    model = FakeListChatModel(responses=list(lines))
    return lambda state: {"messages": [model.invoke(state["messages"])]}


def line(saver: Any = None, **nodes: Any) -> Any:
    return graph_of(**nodes).compile(checkpointer=saver)


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


def test_a_run_starts_unscored_and_refuses_what_is_no_number_and_no_id() -> None:
    with capture(scenario="q", metadata={"seed": 1}, id="mine") as run:
        assert run.reward is None
        for bad in (math.nan, math.inf, "many"):
            with pytest.raises(ConfigError, match="reward"):
                run.reward = bad  # type: ignore[assignment]
        run.reward = True
    trajectory = run.trajectory()
    assert (trajectory.id, trajectory.reward, trajectory.scenario) == ("mine", 1.0, "q")
    assert trajectory.status == "completed" and trajectory.metadata["seed"] == 1
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory
    with pytest.raises(ConfigError, match="trajectory_id"):
        capture(id="no spaces")
    with capture() as one, (scope := capture()) as other:
        assert one.id != other.id
    with pytest.raises(ConfigError), scope:
        pass


def test_input_and_output_are_those_of_the_call_whatever_is_appended_to_them() -> None:
    graph = line(a=says("one", "two"))
    history: list[Any] = [HumanMessage("hi")]
    with capture() as run:
        history += graph.invoke({"messages": history})["messages"][1:]
        history.append(HumanMessage("and?"))
        state = graph.invoke({"messages": history})
        state["messages"].append(HumanMessage("bye"))
    found = run.trajectory()
    assert [one["content"] for one in found.input["messages"]] == ["hi"]
    assert [one["content"] for one in found.output["messages"]] == ["hi", "one", "and?", "two"]


class Fan(TypedDict):
    words: Annotated[list[str], operator.add]


def test_equal_branches_go_on_in_their_own() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def worker(word: Any) -> Fan:
        model = FakeListChatModel(responses=["same"])
        first = model.invoke([HumanMessage("same")])
        barrier.wait()
        model.invoke([HumanMessage("same"), first, HumanMessage("more")])
        return {"words": []}

    graph = StateGraph(Fan).add_node("worker", worker)
    graph.add_conditional_edges(START, lambda _: [Send("worker", word) for word in "ab"])
    with capture() as run:
        graph.compile().invoke({"words": []})
    second = [turn for turn in run.turns if turn.extends is not None]
    assert len(second) == 2
    assert all(run.turns[turn.extends or 0].namespace == turn.namespace for turn in second)


def test_a_broken_payload_harms_no_graph_and_odd_messages_become_text() -> None:
    class Odd(Scripted):
        def choices(self, messages: Any) -> list[AIMessage]:
            reply = AIMessage("x", usage_metadata=None)
            object.__setattr__(reply, "usage_metadata", {"input_tokens": 1})
            return [reply]

    odd = HumanMessage([{"type": "text"}])  # a text block without its text
    with capture() as run:
        assert Odd(lines=[""]).invoke([SystemMessage("s"), odd]).content == "x"
    assert run.error is not None and "on_llm_end" in run.error
    assert run.turns[0].messages[1]["role"] in ("human", "user")
    run.trajectory().model_dump_json()


def look(what: str = "") -> str:
    """Look at something."""
    return f"seen {what}"


def chat_bytes(turns: int) -> int:
    asks = [{"name": "look", "args": {"what": "x" * 200}, "id": f"c{i}"} for i in range(turns - 1)]
    lines = [*(AIMessage("", tool_calls=[one]) for one in asks), "done"]
    agent = create_agent(Scripted(lines=lines), [tool(look)], system_prompt="s" * 500)
    with capture() as run:
        agent.invoke(ASK, {"recursion_limit": 4 * turns})
    trajectory = run.trajectory()
    assert [turn.extends for turn in run.turns] == [None, *range(turns - 1)]
    assert len(trajectory.prompt(turns - 1)) == 2 * turns
    return len(trajectory.model_dump_json())


def test_size_is_linear_in_turns() -> None:
    assert chat_bytes(40) <= 2.1 * chat_bytes(20)


MERGES = Version(version("langgraph")) >= Version("1.2.3")
"""Whether a config with callbacks adds to those around it, or replaces them."""


@pytest.mark.parametrize("config", [{}, {"callbacks": [BaseCallbackHandler()]}][: 1 + MERGES])
def test_a_scope_hears_that_a_graph_stops_where_it_was_told_to(config: Any) -> None:
    graph = graph_of(plan=says("p"), act=says("a"))
    agent: Any = graph.compile(checkpointer=InMemorySaver(), interrupt_before=["act"])
    with capture() as outer, capture() as run:
        agent.invoke(ASK, THREAD | config)
        assert outer.status == run.status == "interrupted"
        agent.invoke(None, THREAD | config)
    assert run.status == "completed"
    assert told(run) == [("p", None), ("a", None)]


def test_a_chain_waits_with_its_graph() -> None:
    waits: Runnable[Any, Any] = RunnableLambda(lambda ask: ask) | line(
        InMemorySaver(), asks=asking("x")
    )
    with capture() as run:
        waits.invoke(ASK, THREAD)
    assert run.status == "interrupted"


class Refusing(FakeListChatModel):
    """Refuses what says "no"."""

    batch = Runnable.batch  # the fake's own raises

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        if "no" in messages[-1].text:
            raise ValueError("refused")
        return super()._generate(messages, *args, **kwargs)


def handled(runnable: Runnable[Any, Any], said: Any = "no") -> None:
    with suppress(ValueError):
        runnable.invoke(said)


REFUSING = Refusing(responses=["ok"])
CHAIN: Runnable[Any, Any] = RunnableLambda(lambda said: said) | REFUSING
AGAIN: dict[str, Any] = {"stop_after_attempt": 2, "wait_exponential_jitter": False}  # at once


@tool
def search(said: str) -> str:
    """Search."""
    raise ValueError(said)


@pytest.mark.parametrize("first", ["yes", None])
@pytest.mark.parametrize("what", [REFUSING, CHAIN, REFUSING.with_retry(**AGAIN), search])
def test_what_a_program_without_a_graph_handles_fails_no_run(what: Any, first: str | None) -> None:
    with capture() as run:
        if first is not None:
            REFUSING.invoke(first)
        handled(what)
        assert (run.trajectory().status, run.error) == ("completed", None)
    assert (run.status, run.error) == ("completed", None)
    errors = [turn.error for turn in run.turns]
    assert errors.count(None) == (first is not None)
    assert {*errors} <= {None, "ValueError: refused"}


@pytest.mark.parametrize("last", ["yes", "no"])
def test_the_order_of_ends_decides_nothing(last: str) -> None:
    other_is_over = threading.Event()

    def ask(said: str) -> None:
        if said == last:
            other_is_over.wait(60)
        handled(CHAIN, said)
        other_is_over.set()

    with capture() as run, ThreadPoolExecutor(2) as pool:
        for said in ("yes", "no"):
            pool.submit(copy_context().run, ask, said)
    assert (run.status, run.error) == ("completed", None)
    assert [turn.error for turn in run.turns if turn.error] == ["ValueError: refused"]
    with capture() as run:
        REFUSING.batch(["yes", "no"], return_exceptions=True)
    assert (run.status, run.error) == ("completed", None)


def test_what_leaves_the_scope_fails_it() -> None:
    for what, error in ((REFUSING, "refused"), (CHAIN, "refused"), (search, "no")):
        with pytest.raises(ValueError, match=error), capture() as run:
            what.invoke("no")
        assert (run.status, run.error) == ("failed", f"ValueError: {error}")
    run = Run()  # without a scope, by its handler
    with pytest.raises(ValueError, match="refused"):
        CHAIN.invoke("no", {"callbacks": [CaptureHandler(run)]})
    assert (run.status, run.error) == ("failed", "ValueError: refused")


def test_a_chain_that_is_handled_within_a_node_or_beside_a_graph() -> None:
    def node(state: Any) -> Any:
        with capture() as inner:
            handled(CHAIN)
        assert inner.status == "completed"
        handled(CHAIN)
        return {}

    with capture() as run:
        line(n=node).invoke(ASK)
        handled(CHAIN)
    assert (run.status, run.error) == ("completed", None)
    for last in (lambda: handled(CHAIN), lambda: handled(REFUSING)):
        with capture() as run:
            handled(line(n=failing), ASK)
            last()
        assert (run.status, run.error) == ("failed", "ValueError: no"), "a graph's failure stays"


# ---- which calls count


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
    class Twice(FakeListChatModel):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
            replies = [ChatGeneration(message=AIMessage(text)) for text in self.responses]
            return ChatResult(generations=replies)

    with capture() as run:
        config: Any = {"callbacks": [CaptureHandler(run)]}
        line(a=says("x"), b=says("y")).invoke(ASK, config)
        Twice(responses=["x", "y"]).invoke("?", config)
    assert told(run) == [("x", None), ("y", None), ("x", None), ("y", "unchosen")]
    assert [turn.extends for turn in run.turns][:2] == [None, 0]
    assert run.status == "completed"


def test_all_handlers_around_hear_a_call_with_callbacks_of_its_own() -> None:
    handlers, model = [CaptureHandler() for _ in range(3)], FakeListChatModel(responses=["x"])
    own: Any = {"callbacks": [BaseCallbackHandler()]}
    inner = line(alone=lambda state: {"messages": [model.invoke("a", own)]})
    around: Any = {"callbacks": [*handlers[:2], handlers[0]]}
    line(nested=lambda state: inner.invoke(state, around)).invoke(ASK, {"callbacks": handlers[2:]})
    model.invoke("b")  # outside of the graph nobody hears
    for handler in handlers:
        assert [turn.node for turn in handler.run.turns] == ["alone"]
        assert handler.run.status == "completed"


def test_a_config_whose_run_id_is_used_again_is_another_run() -> None:
    model, config = FakeListChatModel(responses=["x", "y"]), RunnableConfig(run_id=uuid4())
    with capture() as run:
        model.invoke("one", config)
        model.invoke("two", config)
    assert told(run) == [("x", None), ("y", None)]

    def shaky(state: Any) -> None:
        if said(state)["messages"][0].text == "x":
            raise ValueError("no")

    said = says("x", "y")
    with capture() as run:
        with suppress(ValueError):
            line(a=shaky).invoke(ASK, config)
        line(a=shaky).invoke(ASK, config)
    assert told(run) == [("x", "error"), ("y", None)]
    assert run.status == "completed"


def test_calls_without_an_id_are_said_and_a_run_that_failed_needs_no_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with capture() as run:
        line(a=says("x"), b=says("y")).invoke(ASK)
    (why,) = run.trajectory().metadata["not_heard"]
    assert why.startswith("2 of the calls of the model None reported no id")
    caplog.clear()
    with pytest.raises(ValueError, match="no"), capture() as run:
        line(n=failing).invoke(ASK)
    assert not caplog.text
    assert "not_heard" not in run.trajectory().metadata


def _ask_in_a_child(word: str) -> tuple[str, list[str]]:
    said: list[str] = []
    log = logging.getLogger("langchain_art.tracing")
    log.addHandler(heard := logging.Handler())
    heard.emit = lambda record: said.append(record.getMessage())
    model = FakeListChatModel(responses=[word, word])
    return model.invoke("?").text + model.invoke("?").text, said


def test_a_call_in_a_forked_process_is_said_there_and_here() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool, capture() as run:
        text, said = pool.submit(_ask_in_a_child, "x").result()
    assert text == "xx"
    assert len(said) == 1
    assert f"run {run.id} does not hear" in said[0]
    assert "process pools" in run.trajectory().metadata["not_heard"][0]


def test_a_scenario_may_be_a_question_of_any_length() -> None:
    question = "Who? " * 100
    with capture(scenario=question) as run, capture(scenario=question + "!") as other:
        pass
    assert run.scenario == scenario_id({"id": question})
    assert len(run.scenario) <= 256
    assert run.trajectory().scenario == run.scenario != other.scenario


def test_a_stream_that_the_collector_closes_within_a_callback_ends_there() -> None:
    class Collecting(list[Any]):
        def __iter__(self) -> Any:
            gc.collect()
            return super().__iter__()

    class Reader:
        def __init__(self) -> None:
            self.itself, self.stream = self, FakeListChatModel(responses=["ab"]).stream("?")

    with capture() as run:
        next(Reader().stream)
        handler = CaptureHandler(run)

        def ask() -> None:
            handler.on_chat_model_start({}, [Collecting([HumanMessage("?")])], run_id=uuid4())

        asking = threading.Thread(target=ask, daemon=True)
        gc.disable()
        asking.start()
        asking.join(30)
        gc.enable()
        assert not asking.is_alive()
    assert run.turns[0].error == "GeneratorExit: "


def test_a_scope_inside_of_a_node_leaves_its_config_alone_and_both_hear() -> None:
    inner: list[Run] = []

    def node(state: Any) -> None:
        before = var_child_runnable_config.get()
        with capture() as run:
            assert var_child_runnable_config.get() is before
            for asked in (REFUSING, CHAIN, CHAIN):
                asked.invoke("yes")
        inner.append(run)

    with capture() as outer:
        line(n=node).invoke(ASK)
    assert told(inner[0]) == told(outer) == [("ok", None)] * 3


# ---- models that ask another model


class Sampled(FakeListChatModel):
    """Names its calls, as our server does."""

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        result = super()._generate(*args, **kwargs)
        for generation in result.generations:
            generation.message.response_metadata["call_id"] = f"call-{uuid4()}"
        return result

    def _stream(self, *args: Any, **kwargs: Any) -> Any:
        for number, chunk in enumerate(super()._stream(*args, **kwargs)):
            if number == 0:
                chunk.message.response_metadata["call_id"] = f"call-{uuid4()}"
            yield chunk


class Wrapper(BaseChatModel):
    """Asks another model and passes on what it said."""

    inner: BaseChatModel
    how: str = "plain"

    @property
    def _llm_type(self) -> str:
        return "wrapper"

    def _generate(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        told: Any = {"callbacks": run_manager.handlers} if self.how == "callbacks" else None
        asked = (RunnableLambda(list) | self.inner) if self.how == "chain" else self.inner
        reply = asked.invoke(messages, told)
        return ChatResult(generations=[ChatGeneration(message=reply)])


class StreamingWrapper(Wrapper):
    def _stream(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        for chunk in self.inner.stream(messages):
            yield ChatGenerationChunk(message=chunk)


@pytest.mark.parametrize("how", ["plain", "callbacks", "chain"])
@pytest.mark.parametrize("kind", [Wrapper, StreamingWrapper])
def test_a_model_that_asks_another_is_one_call(kind: Any, how: str) -> None:
    model = kind(inner=Sampled(responses=["one", "two"]), how=how)
    both = kind(inner=kind(inner=Sampled(responses=["three"]), how=how))

    def node(state: Any) -> Any:
        chunks = [chunk for chunk in model.stream(state["messages"]) if chunk.id]
        return {"messages": [sum(chunks[1:], chunks[0])]}

    later = line(a=node, b=lambda s: {"messages": [both.invoke([*s["messages"], ("user", "?")])]})
    for asked in (lambda: later.invoke(ASK), lambda: later.batch([ASK])):
        model.inner.i = 0
        with capture() as run:
            asked()
        assert told(run) == [("one", None), ("three", None)]
        assert [turn.extends for turn in run.turns] == [None, 0]
        assert len(run.recorder.span_list()[1]) == 2
        run.trajectory()
    with capture() as run:
        reply = both.invoke("hi")
        run.reward_turn(reply.response_metadata["call_id"], 1.0)
    assert [turn.reward for turn in run.turns] == [1.0]


async def test_a_model_that_awaits_another_is_one_call() -> None:
    model = Wrapper(inner=Sampled(responses=["one"]))
    with capture() as run:
        await asyncio.gather(model.ainvoke("hi"), model.ainvoke("hi"), model.inner.ainvoke("hi"))
        await model.agenerate([[HumanMessage("a")], [HumanMessage("b")]])
    assert told(run) == [("one", None)] * 5


def test_a_reply_from_a_cache_is_no_second_call() -> None:
    model = Sampled(responses=["one", "two"], cache=InMemoryCache())
    with capture() as run:
        line(a=lambda state: {"messages": [model.invoke("hi"), model.invoke("hi")]}).invoke(ASK)
    assert told(run) == [("one", None)]


def test_calls_of_a_server_that_gives_all_one_id_are_calls_of_their_own() -> None:
    same = [AIMessage("same", response_metadata={"call_id": "chatcmpl-123"})]
    model = Scripted(lines=same)
    with capture() as run:
        model.invoke("one")
        model.batch(["two", "three"])
    assert told(run) == [("same", None)] * 3


def test_what_is_asked_between_two_chunks_is_not_asked_by_the_model() -> None:
    stream = FakeListChatModel(responses=["long"]).stream("hi")
    with capture() as run:
        next(stream)
        says("other")(ASK)
        stream.close()
    assert told(run)[1:] == [("other", None)]
