import asyncio
import random
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from threading import Event
from typing import Any

import pluggy
import pytest
from langchain_core.callbacks import StdOutCallbackHandler
from langchain_core.language_models import FakeListChatModel
from langchain_core.runnables.config import ContextThreadPoolExecutor, var_child_runnable_config
from langgraph.graph import StateGraph

from langchain_art import capture
from tests.support.graphs import ASK, graph_of
from tests.support.soak import count

model = FakeListChatModel(responses=["yes"])
AGENTS = 3


def heard(run: Any) -> list[str]:
    """The questions of a run's calls."""
    return [turn.messages[-1]["content"] for turn in run.turns]


def asking(name: str, *, asynchronous: bool = False) -> StateGraph[Any]:
    def node(state: Any) -> Any:
        return {"messages": [model.invoke(f"{name} in a node")]}

    async def anode(state: Any) -> Any:
        return {"messages": [await model.ainvoke(f"{name} in a node")]}

    asks = anode if asynchronous else node
    return graph_of(first=asks, second=asks, third=asks)


def rollout(name: str, runs: dict[str, Any]) -> Iterator[str]:
    """Asks in all ways that there are, and yields between them."""
    with capture(scenario=name) as run:
        runs[name] = run
        yield "opened"
        model.invoke(f"{name} alone")
        yield "asked"
        for _ in asking(name).compile().stream(ASK, stream_mode="updates"):
            yield "a step"
        model.batch([f"{name} in a thread"] * 2)
        for chunk in model.stream(f"{name} in a stream"):
            yield chunk.text
        asking(name).compile().invoke(ASK)
        yield from within(name)


def within(name: str) -> Iterator[str]:
    model.invoke(f"{name} within")
    yield "within"
    model.invoke(f"{name} within")


async def arollout(name: str, runs: dict[str, Any]) -> AsyncIterator[str]:
    async with capture(scenario=name) as run:
        runs[name] = run
        yield "opened"
        await asyncio.sleep(0)
        await model.ainvoke(f"{name} alone")
        yield "asked"
        async for _ in asking(name, asynchronous=True).compile().astream(ASK):
            yield "a step"
        async for chunk in model.astream(f"{name} in a stream"):
            yield chunk.text
        await asking(name, asynchronous=True).compile().ainvoke(ASK)
        for part in within(name):
            yield part


EVERYWHERE = ["alone", *["in a node"] * 6, "in a stream", "within", "within"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(count(4, 200)))
def test_generators_that_are_read_in_turns_hear_their_own_calls(seed: int) -> None:
    turns, runs = random.Random(seed), dict[str, Any]()
    open_ = {name: rollout(name, runs) for name in "abc"[:AGENTS]}
    with capture() as reader:
        while open_:
            name = turns.choice(sorted(open_))
            if turns.random() < 0.03:
                open_.pop(name).close()
            elif next(open_[name], None) is None:
                del open_[name]
                assert sorted(heard(runs[name])) == sorted(
                    f"{name} {where}" for where in [*EVERYWHERE, *["in a thread"] * 2]
                )
            if turns.random() < 0.5:
                model.invoke("of the reader")
            if turns.random() < 0.2:
                model.batch(["of the reader"] * 2)
            if turns.random() < 0.2:
                with capture() as other:
                    asking("of the reader").compile().invoke(ASK)
                assert heard(other) == ["of the reader in a node"] * 3
    model.invoke("after")
    assert var_child_runnable_config.get() is None
    for name, run in runs.items():
        assert all(question.startswith(name) for question in heard(run))
    # The reader's scope is around all of them, as it is around any function that opens its own.
    own = [question for question in heard(reader) if not question.startswith("of the reader")]
    assert sorted(own) == sorted(question for run in runs.values() for question in heard(run))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(count(4, 200)))
@pytest.mark.parametrize("in_tasks", [False, True])
async def test_asynchronous_generators_that_are_read_in_turns(seed: int, in_tasks: bool) -> None:
    turns, runs = random.Random(seed), dict[str, Any]()
    open_ = {name: arollout(name, runs) for name in "abc"[:AGENTS]}

    async def step(name: str) -> None:
        asked = anext(open_[name], None)
        part = await (asyncio.create_task(awaited(asked)) if in_tasks else asked)
        if part is None:
            del open_[name]

    while open_:
        names = turns.sample(sorted(open_), turns.randint(1, len(open_)))
        if in_tasks:
            await asyncio.gather(*map(step, names), model.ainvoke("of the reader"))
        else:
            await step(names[0])
            await model.ainvoke("of the reader")
            await asyncio.gather(model.ainvoke("of the reader"), asyncio.sleep(0))
    for name, run in runs.items():
        assert sorted(heard(run)) == sorted(f"{name} {where}" for where in EVERYWHERE)
        assert run.status == "completed"


async def awaited(asked: Any) -> Any:
    return await asked


async def test_a_task_that_goes_on_while_the_reader_has_an_item_is_heard() -> None:
    parts: asyncio.Queue[str | None] = asyncio.Queue()
    taken, asked = asyncio.Event(), asyncio.Event()

    async def agent() -> None:
        await model.ainvoke("part 0")
        await parts.put("first")
        await taken.wait()
        await model.ainvoke("part 1")
        await asyncio.to_thread(model.invoke, "part 2")
        asked.set()
        await parts.put(None)

    async def body() -> AsyncIterator[Any]:
        with capture() as run:
            working = asyncio.create_task(agent())
            while await parts.get() is not None:
                yield run
            await working

    runs: list[Any] = []
    async for run in body():
        runs.append(run)
        taken.set()
        await asked.wait()  # the agent makes its other calls between two items
        await asyncio.gather(model.ainvoke("reader"), asyncio.to_thread(model.invoke, "reader"))
    assert heard(runs[0]) == ["part 0", "part 1", "part 2"]


def test_a_thread_that_goes_on_while_the_reader_has_an_item_is_heard() -> None:
    began, taken, asked, runs = Event(), Event(), Event(), list[Any]()

    def agent() -> None:
        model.invoke("part 0")
        began.set()
        taken.wait()
        model.invoke("part 1")
        asked.set()

    def body() -> Iterator[Any]:
        with capture() as run, ContextThreadPoolExecutor() as pool:
            pool.submit(agent)
            began.wait()
            yield run

    for run in body():
        runs.append(run)
        taken.set()
        asked.wait()
        model.batch(["reader"] * 2)
    assert heard(runs[0]) == ["part 0", "part 1"]


def test_a_generator_hears_that_its_graph_stops_where_it_was_told_to() -> None:
    def body() -> Iterator[Any]:
        with capture() as run:
            yield run
            asking("a").compile(interrupt_before=["second"]).invoke(ASK)

    first, second = body(), body()
    run, other = next(first), next(second)
    assert list(first) == []
    assert (run.status, other.status) == ("interrupted", "completed")
    assert list(second) == []
    assert other.status == "interrupted"


@pytest.mark.parametrize(
    "given", [None, {"tags": ["mine"]}, {"callbacks": [StdOutCallbackHandler()]}]
)
def test_scopes_that_end_in_the_order_in_which_they_began_leave_the_config_as_it_was(
    given: Any,
) -> None:
    token = var_child_runnable_config.set(given)
    try:
        first, second = capture(), capture()
        first.__enter__(), second.__enter__()
        inside = var_child_runnable_config.get() or {}
        assert inside.get("tags") == (given or {}).get("tags")
        first.__exit__(None, None, None), second.__exit__(None, None, None)
        left = {name: v for name, v in (var_child_runnable_config.get() or {}).items() if v}
        assert left == (given or {})
    finally:
        var_child_runnable_config.reset(token)


@contextmanager
def recorded_in_a_stack() -> Iterator[Any]:
    with ExitStack() as stack:
        yield stack.enter_context(capture())


@contextmanager
def recorded_twice() -> Iterator[Any]:
    with recorded_in_a_stack() as run:
        yield run


@pytest.mark.parametrize("manager", [capture, recorded_twice])
def test_a_context_manager_opens_its_scope_for_the_code_around_it(manager: Any) -> None:
    def body(runs: list[Any]) -> Iterator[None]:
        with manager() as run:
            runs.append(run)
            model.invoke("body")
            yield
            model.invoke("body")

    with manager() as run:
        model.invoke("around")
    assert heard(run) == ["around"]
    runs: list[Any] = []
    for _ in zip(body(runs), body(runs), strict=True):
        model.invoke("reader")
    assert [heard(run) for run in runs] == [["body"] * 2] * 2


async def test_an_asynchronous_context_manager_too() -> None:
    @asynccontextmanager
    async def arecorded() -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            yield await stack.enter_async_context(capture())

    async with arecorded() as run:
        await model.ainvoke("around")
    assert heard(run) == ["around"]


def test_a_hook_wrapper_opens_its_scope_for_the_hooks_in_it() -> None:
    runs: list[Any] = []

    class Hooks:
        @pluggy.HookspecMarker("asking")
        def ask(self) -> None: ...

    class Recording:
        @pluggy.HookimplMarker("asking")(wrapper=True)
        def ask(self) -> Generator[None, Any, Any]:
            with capture() as run:
                runs.append(run)
                return (yield)

    class Asking:
        @pluggy.HookimplMarker("asking")
        def ask(self) -> None:
            model.invoke("hook")

    manager = pluggy.PluginManager("asking")
    manager.add_hookspecs(Hooks)
    for plugin in (Recording(), Asking()):
        manager.register(plugin)
    manager.hook.ask()
    assert heard(runs[0]) == ["hook"]


@pytest.fixture
def fixed() -> Iterator[Any]:
    with capture() as run:
        yield run


def test_a_fixture_opens_its_scope_for_the_test(fixed: Any) -> None:
    model.invoke("test")
    assert heard(fixed) == ["test"]
