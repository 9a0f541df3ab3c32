"""Threads, tasks and batches; calls beside each other and outside of graphs."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableParallel
from langgraph.graph import MessagesState

from tests.conformance.suite.harness import Expect, Kit, Program, topology
from tests.conformance.suite.nodes import line


def _many(*says: str) -> list[Expect]:
    return [Expect("many", word, step=1, task="many") for word in says]


def _only(node: Any) -> Any:
    return line(MessagesState, many=node).compile()


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
    remark="for asynchronous programs",
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
