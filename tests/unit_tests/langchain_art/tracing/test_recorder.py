import asyncio
import gc
import logging
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt
from packaging.version import Version

from langchain_art import CaptureHandler, capture
from langchain_art.tracing.run import Run
from langchain_art.wire.identifiers import scenario_id

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


@pytest.mark.parametrize("what", [REFUSING, CHAIN])
@pytest.mark.parametrize("last", ["yes", "no"])
def test_the_order_of_ends_decides_nothing(what: Any, last: str) -> None:
    other_is_over = threading.Event()

    def ask(said: str) -> None:
        if said == last:
            other_is_over.wait(60)
        handled(what, said)
        other_is_over.set()

    with capture() as run, ThreadPoolExecutor(2) as pool:
        for said in ("yes", "no"):
            pool.submit(copy_context().run, ask, said)
    assert (run.status, run.error) == ("completed", None)
    assert [turn.error for turn in run.turns if turn.error] == ["ValueError: refused"]
    with capture() as run:
        what.batch(["yes", "no"], return_exceptions=True)
    assert (run.status, run.error) == ("completed", None)


@pytest.mark.parametrize("what", [REFUSING, CHAIN, search])
def test_what_leaves_the_scope_fails_it(what: Any) -> None:
    with pytest.raises(ValueError, match=r"no|refused"), capture() as run:
        what.invoke("no")
    assert run.status == "failed"
    assert run.error in ("ValueError: refused", "ValueError: no")


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


def test_without_a_scope_the_handlers_run_fails_with_its_chain() -> None:
    run = Run()
    with pytest.raises(ValueError, match="refused"):
        CHAIN.invoke("no", {"callbacks": [CaptureHandler(run)]})
    assert (run.status, run.error) == ("failed", "ValueError: refused")


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


def test_a_config_whose_run_id_is_used_again_is_another_run() -> None:
    model, config = FakeListChatModel(responses=["x", "y"]), RunnableConfig(run_id=uuid4())
    with capture() as run:
        model.invoke("one", config)
        model.invoke("two", config)
    assert told(run) == [("x", None), ("y", None)]

    slow = FakeListChatModel(responses=["z"], sleep=0.5)

    async def again() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(slow.ainvoke("?", config), 0.1)
        await model.ainvoke("?", config)

    with capture() as run:
        asyncio.run(again())
    assert told(run) == [(None, "error"), ("x", None)]

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


def test_a_scope_that_hears_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with capture() as run:
        line(n=lambda state: {}).invoke(ASK)
    assert "RemoteGraph" in caplog.text
    assert run.id in caplog.text
    (why,) = run.trajectory().metadata["not_heard"]
    assert "RemoteGraph" in why
    caplog.clear()
    with pytest.raises(ValueError, match="no"), capture() as run:
        line(n=failing).invoke(ASK)
    assert not caplog.text
    assert "not_heard" not in run.trajectory().metadata


def test_calls_without_an_id_are_said() -> None:
    with capture() as run:
        line(a=says("x"), b=says("y")).invoke(ASK)
    (why,) = run.trajectory().metadata["not_heard"]
    assert why.startswith("2 of the calls of the model None reported no id")


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
    with capture(scenario="q" * 256) as run:
        assert run.scenario == "q" * 256


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


# ---- the scope itself


def test_a_scope_leaves_the_config_as_it_was() -> None:
    with capture():
        with capture():
            pass
        outer = var_child_runnable_config.get()
        assert outer is not None
        assert len(outer.get("callbacks") or []) == 1
    assert var_child_runnable_config.get() is None


def test_a_scope_inside_of_a_node_leaves_the_nodes_config_alone() -> None:
    def node(state: Any) -> None:
        before = var_child_runnable_config.get()
        with capture():
            assert var_child_runnable_config.get() is before

    line(n=node).invoke(ASK)


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


async def test_calls_of_a_server_that_gives_all_one_id_are_calls_of_their_own() -> None:
    class OneId(FakeListChatModel):
        def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
            reply = AIMessage("same", response_metadata={"call_id": "chatcmpl-123"})
            return ChatResult(generations=[ChatGeneration(message=reply)])

    model = OneId(responses=[""])
    with capture() as run:
        model.invoke("one")
        await asyncio.gather(*(model.ainvoke(name) for name in ("two", "three")))
    assert told(run) == [("same", None)] * 3


def test_what_is_asked_between_two_chunks_is_not_asked_by_the_model() -> None:
    stream = FakeListChatModel(responses=["long"]).stream("hi")
    with capture() as run:
        next(stream)
        says("other")(ASK)
        stream.close()
    assert told(run)[1:] == [("other", None)]
