"""The agent: write a query, run it, check it, rewrite it. Nothing in it knows of training."""

from __future__ import annotations

import operator
import re
from typing import Annotated, Literal

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime
from typing_extensions import TypedDict

from examples.text_to_sql.environment import Database

WRITE = "Write one SQLite query that answers the question."
CHECK = "Does the query answer the question? Say right or wrong."
REWRITE = "The query is wrong. Write another SQLite query that answers the question."
RIGHT, WRONG = "right", "wrong"
MAX_REWRITES = 2


class State(TypedDict, total=False):
    """What the graph knows: ``schema`` and ``question`` come in, the rest is found out.

    ``queries`` and ``results`` are of equal length, oldest first. ``approved`` has the checker's
    verdicts; the last query allowed is not checked, since nothing would follow from it.
    """

    schema: str
    question: str
    queries: Annotated[list[str], operator.add]
    results: Annotated[list[str], operator.add]
    approved: Annotated[list[bool], operator.add]


def task(schema: str, question: str) -> str:
    """What the writer is shown."""
    return f"{schema}\n{question}"


def attempt(question: str, query: str, result: str) -> str:
    """What the checker is shown."""
    return f"{question}\n{query}\n{result}"


def query_of(reply: str) -> str:
    """The query in a reply: what stands in a code fence if there is one, else all of it."""
    fenced = re.search(r"```(?:\w+\n)?(.*?)```", reply, re.DOTALL)
    return (fenced[1] if fenced else reply).strip().rstrip(";")


def build_agent(
    model: BaseChatModel, max_rewrites: int = MAX_REWRITES
) -> CompiledStateGraph[State, Database, State, State]:
    """Build the agent as a LangGraph graph; one serves all runs, each brings its own database.

    Args:
        model: Any chat model.
        max_rewrites: Most queries after the first one.

    Returns:
        The graph, to be run with `await agent.ainvoke({"schema": …, "question": …},
        context=database)`. Its nodes are coroutines, so `invoke` does not work.

    Example:
        >>> agent = build_agent(model)  # doctest: +SKIP
        >>> state = await agent.ainvoke(
        ...     {"schema": scenario.schema, "question": scenario.question},
        ...     context=databases.of(scenario),
        ... )  # doctest: +SKIP
        >>> state["results"][-1]  # doctest: +SKIP
        '47'
    """

    async def ask(system: str, text: str) -> str:
        reply = await model.ainvoke([("system", system), ("user", text)])
        return reply.text

    async def write(state: State) -> State:
        return {"queries": [query_of(await ask(WRITE, task(state["schema"], state["question"])))]}

    async def execute(state: State, runtime: Runtime[Database]) -> State:
        return {"results": [str(runtime.context.run(state["queries"][-1]))]}

    async def check(state: State) -> State:
        text = attempt(state["question"], state["queries"][-1], state["results"][-1])
        said = (await ask(CHECK, text)).casefold()
        return {"approved": [WRONG not in said]}

    async def rewrite(state: State) -> State:
        shown = attempt(state["question"], state["queries"][-1], state["results"][-1])
        return {"queries": [query_of(await ask(REWRITE, f"{state['schema']}\n{shown}"))]}

    def after_execute(state: State) -> Literal["check", "__end__"]:
        return "check" if len(state["queries"]) <= max_rewrites else END

    def after_check(state: State) -> Literal["rewrite", "__end__"]:
        return END if state["approved"][-1] else "rewrite"

    graph = StateGraph(State, context_schema=Database)
    graph.add_node("write", write)
    graph.add_node("execute", execute)
    graph.add_node("check", check)
    graph.add_node("rewrite", rewrite)
    graph.add_edge(START, "write")
    graph.add_edge("write", "execute")
    graph.add_conditional_edges("execute", after_execute)
    graph.add_conditional_edges("check", after_check)
    graph.add_edge("rewrite", "execute")
    return graph.compile()
