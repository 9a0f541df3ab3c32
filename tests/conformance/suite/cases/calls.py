"""Ways to call a model inside of a node that do not tell LangChain which node it is."""

from __future__ import annotations

import contextvars
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from tests.conformance.suite.cases.agents import alone
from tests.conformance.suite.harness import Expect, Kit, Program, topology
from tests.conformance.suite.nodes import RETRY, Failing, line, talk
from tests.conformance.suite.tools import LOOK, look


class OwnCallbacks:
    """Runs something with callbacks and metadata of the call's own."""

    def __init__(self, runnable: Any) -> None:
        self._runnable = runnable
        self._config = {"callbacks": [BaseCallbackHandler()], "metadata": {"mine": "1"}}

    def invoke(self, given: Any) -> Any:
        return self._runnable.invoke(given, self._config)

    async def ainvoke(self, given: Any) -> Any:
        return await self._runnable.ainvoke(given, self._config)


class Generated:
    """Calls ``generate``, which takes no config, and gives one of the choices."""

    def __init__(self, model: Any, choice: int = 0) -> None:
        self._model, self._choice = model, choice

    def invoke(self, prompt: Any) -> Any:
        return self._model.generate([prompt]).generations[0][self._choice].message

    async def ainvoke(self, prompt: Any) -> Any:
        result = await self._model.agenerate([prompt])
        return result.generations[0][self._choice].message


def ways(kit: Kit) -> dict[str, Any]:
    return {
        "callbacks": OwnCallbacks(kit.model),
        "with_config": kit.model.with_config(callbacks=[BaseCallbackHandler()]),
        "bind": OwnCallbacks(kit.model.bind(stop=["never"])),
        "generate": Generated(kit.model),
    }


WAYS = ("callbacks", "with_config", "bind", "generate")


@topology(
    "calls with callbacks of their own, retried",
    *(Expect("shaky", way, step=1, task="shaky", why="superseded_retried") for way in WAYS),
    *(Expect("shaky", way, step=1, task="shaky", attempt=2) for way in WAYS),
    remark="`invoke` and `with_config` with callbacks, `generate`",
)
def own_callbacks_retried(kit: Kit) -> Program:
    yield kit.run(_retried_ways(kit), kit.ask())


def _retried_ways(kit: Kit) -> Any:
    """A graph of one node that calls in all ways, and fails once."""
    failing = Failing(1)

    def body(state: Any) -> Generator[Any, AIMessage, Any]:
        for way, runnable in ways(kit).items():
            yield runnable, [HumanMessage(kit.says(way))]
        return failing({"messages": [AIMessage("done")]})

    graph = StateGraph(MessagesState).add_node("shaky", talk(kit, body), retry_policy=RETRY)
    return graph.add_edge(START, "shaky").compile()


@topology(
    "calls with callbacks of their own, interrupted",
    *(
        Expect("asks", f"{way} 1", step=1, task="asks", why="superseded_interrupted")
        for way in WAYS
    ),
    *(Expect("asks", f"{way} 2", step=1, task="asks") for way in WAYS),
    threaded=True,
)
def own_callbacks_interrupted(kit: Kit) -> Program:
    tries = count(1)

    def body(state: Any) -> Generator[Any, AIMessage, Any]:
        number = next(tries)
        for way, runnable in ways(kit).items():
            yield runnable, [HumanMessage(kit.says(f"{way} {number}"))]
        return {"messages": [HumanMessage(interrupt("sure?"))]}

    agent = line(MessagesState, asks=talk(kit, body)).compile(checkpointer=InMemorySaver())
    yield kit.run(agent, kit.ask())
    yield kit.run(agent, Command(resume="yes"))


@topology(
    "rivals with callbacks of their own",
    *(
        Expect(way, way, step=step, task=way, why=why)
        for step, way in enumerate(WAYS, 1)
        for why in ("superseded_unchosen", None)
    ),
)
def own_callbacks_rivals(kit: Kit) -> Program:
    def twice(way: str, runnable: Any) -> Any:
        def body(state: Any) -> Generator[Any, AIMessage, Any]:
            prompt = [HumanMessage(kit.says(way))]
            yield runnable, prompt
            return {"messages": [(yield runnable, prompt)]}

        return talk(kit, body)

    nodes = {way: twice(way, runnable) for way, runnable in ways(kit).items()}
    yield kit.run(line(MessagesState, **nodes).compile(), kit.ask())


@topology(
    "a failed chain with callbacks of its own, caught",
    Expect("answer", "try 1", step=1, task="answer", why="superseded_error"),
    Expect("answer", "plainly", step=1, task="answer"),
)
def own_callbacks_caught(kit: Kit) -> Program:
    failing = Failing(1, ValueError)
    parsed = OwnCallbacks(kit.model | RunnableLambda(failing))

    def node(state: Any) -> Any:
        try:
            return {"messages": [(yield parsed, kit.says("try 1"))]}
        except ValueError:
            return {"messages": [(yield kit.says("plainly"))]}

    yield kit.run(alone(talk(kit, node)), kit.ask())


@topology(
    "a graph with callbacks of its own, in a node",
    Expect("team/early", "e", step=1),
    Expect("team/late", "l", step=2),
)
def own_callbacks_graph(kit: Kit) -> Program:
    team = OwnCallbacks(line(MessagesState, early=kit.node(), late=kit.node()).compile())

    def node(state: Any) -> Any:
        return (yield team, state)

    yield kit.run(line(MessagesState, team=talk(kit, node)).compile(), kit.ask("e", "l"))


@topology(
    "calls with callbacks of their own, in threads that copy the context",
    *(Expect("many", way, step=1, task="many") for way in WAYS),
    ordered=False,
    modes=("invoke", "stream"),
    remark="for synchronous programs",
)
def own_callbacks_threads(kit: Kit) -> Program:
    def many(state: Any) -> Any:
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(
                    contextvars.copy_context().run,
                    runnable.invoke,
                    [HumanMessage(kit.says(way))],
                )
                for way, runnable in ways(kit).items()
            ]
        return {"messages": [call.result() for call in calls]}

    yield kit.run(line(MessagesState, many=many).compile(), kit.ask())


@topology(
    "calls with callbacks of their own, a handler in the graph's config",
    *(Expect("shaky", way, step=1, task="shaky", why="superseded_retried") for way in WAYS),
    *(Expect("shaky", way, step=1, task="shaky", attempt=2) for way in WAYS),
    heard="handler",
    remark="`CaptureHandler`, no scope: LangChain itself does not call it for such calls",
)
def own_callbacks_config_handler(kit: Kit) -> Program:
    graph = _retried_ways(kit)
    yield kit.run(graph, kit.ask(), {"callbacks": [BaseCallbackHandler(), kit.handler]})


@topology(
    "generate with several prompts",
    *(Expect("many", word, step=1, task="many") for word in "abc"),
    ordered=False,
)
def many_prompts(kit: Kit) -> Program:
    def many(state: Any) -> Any:
        prompts: Any = [[HumanMessage(kit.says(word))] for word in "abc"]
        return {"messages": [one[0].message for one in kit.model.generate(prompts).generations]}

    async def amany(state: Any) -> Any:
        prompts: Any = [[HumanMessage(kit.says(word))] for word in "abc"]
        result: Any = await kit.model.agenerate(prompts)
        return {"messages": [one[0].message for one in result.generations]}

    node = amany if kit.asynchronous else many
    yield kit.run(line(MessagesState, many=node).compile(), kit.ask())


@topology(
    "the second of three choices",
    Expect("answer", "hello", step=1, task="node", why="superseded_unchosen"),
    Expect("answer", "hello", step=1, task="node"),
    Expect("answer", "hello", step=1, task="node", why="superseded_unchosen"),
    remark="`generate` with `n=3`; the node returns the second",
)
def second_choice(kit: Kit) -> Program:
    asked = Generated(kit.chat(n=3), choice=1)

    def body(state: Any) -> Generator[Any, AIMessage, Any]:
        return {"messages": [(yield asked, state["messages"])]}

    yield kit.run(alone(talk(kit, body)), kit.ask("hello"))


@topology(
    "choices that the node makes something else of",
    *Expect.turns(
        "answer", "a red door", "a red door", apart=0, task="node", why="superseded_unchosen"
    ),
    remark="`n=2`; what the node makes of them holds neither: none is trained",
)
def no_choice(kit: Kit) -> Program:
    asked = Generated(kit.chat(n=2), choice=1)

    def body(state: Any) -> Generator[Any, AIMessage, Any]:
        reply = yield asked, state["messages"]
        return {"messages": [AIMessage(f"It is {reply.text}.")]}

    yield kit.run(alone(talk(kit, body)), kit.ask("a red door"))


@topology(
    "one prompt, two models",
    Expect("answer", "a door", step=1, task="node", why="other_policy", tags=("critic",)),
    Expect("answer", "a door", step=1, task="node"),
    Expect("answer", "a door", step=1, task="node", why="foreign"),
    remark="the node returns the second: the others are no rivals, each answers for itself",
)
def two_models(kit: Kit) -> Program:
    others = kit.chat(kit.rival, tags=["critic"]), kit.foreign("a door")

    def body(state: Any) -> Generator[Any, AIMessage, Any]:
        yield others[0], state["messages"]
        reply = yield state["messages"]
        yield others[1], state["messages"]
        return {"messages": [reply]}

    yield kit.run(alone(talk(kit, body)), kit.ask("a door"))


@topology(
    "one prompt, with tools and without",
    *Expect.turns("answer", "plan", "plan", "plan", apart=0, task="node"),
    remark="three questions, by `stop` and tools; the node returns the last answer",
)
def with_and_without(kit: Kit) -> Program:
    brief, tooled = kit.model.bind(stop=["never"]), kit.model.bind_tools([look])

    def body(state: Any) -> Generator[Any, AIMessage, Any]:
        yield state["messages"]
        yield brief, state["messages"]
        return {"messages": [(yield tooled, state["messages"])]}

    yield kit.run(alone(talk(kit, body)), kit.ask("plan"))


@topology(
    "the best of two temperatures",
    Expect("answer", "hello", step=1, task="node", why="superseded_unchosen"),
    Expect("answer", "hello", step=1, task="node"),
    remark="temperature, seed and the like draw another answer to the same question",
)
def two_temperatures(kit: Kit) -> Program:
    cool = kit.model.bind(temperature=0.7)

    def body(state: Any) -> Generator[Any, AIMessage, Any]:
        yield cool, state["messages"]
        return {"messages": [(yield state["messages"])]}

    yield kit.run(alone(talk(kit, body)), kit.ask("hello"))


@topology(
    "replies that the graph edits in place",
    *Expect.line(draft="Sure! a door", act="look", end="fine"),
    remark="text and arguments: a turn keeps what was sampled, and beside it the edit",
)
def edited(kit: Kit) -> Program:
    def draft(state: Any) -> Generator[Any, AIMessage, Any]:
        reply = yield state["messages"]
        reply.content = reply.text.removeprefix("Sure! ")
        return {"messages": [reply]}

    def act(state: Any) -> Generator[Any, AIMessage, Any]:
        reply = yield kit.model.bind_tools([look]), state["messages"]
        reply.tool_calls[0]["args"]["what"] = "window"
        seen = ToolMessage("a window", tool_call_id=reply.tool_calls[0]["id"])
        return {"messages": [reply, seen]}

    graph = line(MessagesState, draft=talk(kit, draft), act=talk(kit, act), end=kit.node())
    yield kit.run(graph.compile(), kit.ask("Sure! a door", LOOK, "fine"))
