"""Threads, tasks and batches; calls beside each other and outside of graphs; cut histories."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langchain_core.runnables import RunnableParallel
from langgraph.graph import MessagesState
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from tests.conformance.suite.harness import Expect, Kit, Program, topology
from tests.conformance.suite.nodes import line, talk
from tests.conformance.suite.outcomes import same

SYNC = "for synchronous programs"
ASYNC = "for asynchronous programs"


def _many(*says: str) -> list[Expect]:
    return [Expect("many", word, step=1, task="many") for word in says]


def _only(node: Any) -> Any:
    return line(MessagesState, many=node).compile()


@topology(
    "threads that copy the context",
    *_many("a", "b", "end"),
    ordered=False,
    modes=("invoke", "stream"),
    remark=SYNC,
)
def copied_contexts(kit: Kit) -> Program:
    def many(state: Any) -> Any:
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(contextvars.copy_context().run, kit.model.invoke, kit.says(word))
                for word in "ab"
            ]
        same("what the threads said", [call.result().text for call in calls], ["a", "b"])
        return {"messages": [kit.model.invoke(state["messages"])]}

    yield kit.run(_only(many), kit.ask("end"))


@topology(
    "raw threads, heard by the model's own handler",
    *(Expect("", word) for word in "ab"),
    Expect("many", "end", step=1),
    heard="handler",
    ordered=False,
    remark="a thread without the graph's context says nothing of its place",
)
def raw_threads(kit: Kit) -> Program:
    model = kit.chat(callbacks=[kit.handler])

    def many(state: Any) -> Any:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(model.invoke, [kit.says(word) for word in "ab"]))
        return {"messages": [model.invoke(state["messages"])]}

    async def amany(state: Any) -> Any:
        loop = asyncio.get_running_loop()
        says = [loop.run_in_executor(None, model.invoke, kit.says(word)) for word in "ab"]
        await asyncio.gather(*says)
        return {"messages": [await model.ainvoke(state["messages"])]}

    yield kit.run(_only(amany if kit.asynchronous else many), kit.ask("end"))


@topology(
    "asyncio tasks, groups and threads",
    *_many("group 1", "group 2", "gathered 1", "gathered 2", "task", "thread", "end"),
    ordered=False,
    modes=("ainvoke", "astream"),
    remark=ASYNC,
)
def tasks(kit: Kit) -> Program:
    async def many(state: Any) -> Any:
        says, model = kit.says, kit.model
        async with asyncio.TaskGroup() as group:
            group.create_task(model.ainvoke(says("group 1")))
            group.create_task(model.ainvoke(says("group 2")))
        await asyncio.gather(*(model.ainvoke(says(f"gathered {n}")) for n in (1, 2)))
        await asyncio.create_task(model.ainvoke(says("task")))
        await asyncio.to_thread(model.invoke, says("thread"))
        return {"messages": [await model.ainvoke(state["messages"])]}

    yield kit.run(_only(many), kit.ask("end"))


@topology(
    "batches of the model",
    *_many("batch 1", "batch 2", "completed 1", "completed 2", "map", "end"),
    ordered=False,
)
def batches(kit: Kit) -> Program:
    model = kit.model

    def pair(name: str) -> list[str]:
        return [kit.says(f"{name} {number}") for number in (1, 2)]

    def many(state: Any) -> Any:
        model.batch(pair("batch"))
        list(model.batch_as_completed(pair("completed")))
        RunnableParallel(one=model).invoke(kit.says("map"))
        return {"messages": [model.invoke(state["messages"])]}

    async def amany(state: Any) -> Any:
        await model.abatch(pair("batch"))
        [one async for one in model.abatch_as_completed(pair("completed"))]
        await RunnableParallel(one=model).ainvoke(kit.says("map"))
        return {"messages": [await model.ainvoke(state["messages"])]}

    yield kit.run(_only(amany if kit.asynchronous else many), kit.ask("end"))


@topology(
    "a batch of graphs in one scope",
    *(Expect("answer", word, step=1) for word in ("one", "two", "three")),
    ordered=False,
    modes=("invoke", "ainvoke"),
    remark="one scope is one trajectory; open a scope around each run that has its own reward",
)
def batch_of_graphs(kit: Kit) -> Program:
    graph = line(MessagesState, answer=kit.node()).compile()
    states: Any = [kit.ask(word) for word in ("one", "two", "three")]
    yield lambda: graph.abatch(states) if kit.asynchronous else graph.batch(states)


@topology(
    "two graphs, and calls outside of any",
    Expect("", "before"),
    Expect("first", "one", step=1),
    Expect("second", "two", step=1),
    Expect("", "after"),
)
def two_graphs(kit: Kit) -> Program:
    yield kit.run(kit.model, kit.says("before"))
    state = yield kit.run(line(MessagesState, first=kit.node()).compile(), kit.ask("one", "two"))
    state = yield kit.run(line(MessagesState, second=kit.node()).compile(), state)
    yield kit.run(kit.model, [*state["messages"], HumanMessage(kit.says("after"))])


@topology(
    "a history trimmed by hand",
    *Expect.line(chat="one", again="two", thrice="three"),
    remark="what was cut off forks: the reply is trained in a row of its own",
)
def trimmed(kit: Kit) -> Program:
    def chat(state: Any) -> Generator[Any, AIMessage, Any]:
        reply = yield state["messages"][-3:]
        word = {"one": "two", "two": "three"}.get(reply.text)
        asks = [HumanMessage(kit.says(word))] if word else []
        return {"messages": [reply, *asks]}

    node = talk(kit, chat)
    graph = line(MessagesState, chat=node, again=node, thrice=node)
    yield kit.run(graph.compile(), kit.ask("one"))


@topology(
    "a history summarised in a node", *Expect.line(chat="one", summarise="in short", answer="end")
)
def summarised(kit: Kit) -> Program:
    def summarise(state: Any) -> Generator[Any, AIMessage, Any]:
        reply = yield [*state["messages"], HumanMessage(kit.says("in short"))]
        short = HumanMessage(f"So far: {reply.text}. {kit.says('end')}")
        return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), short]}

    graph = line(MessagesState, chat=kit.node(), summarise=talk(kit, summarise), answer=kit.node())
    yield kit.run(graph.compile(), kit.ask("one"))
