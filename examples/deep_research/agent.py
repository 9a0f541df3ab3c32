"""The agent: plan searches, do them side by side, write. Nothing in it knows of training."""

from __future__ import annotations

import operator
from typing import Annotated

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime
from langgraph.types import Send
from typing_extensions import TypedDict

from examples.deep_research.environment import Corpus

PLAN = "Plan the searches, one per line: town and topic."
READ = "Say in one word what the documents tell. Records are checked, rumours are not."
WRITE = "Answer with the facts alone, in the order asked, with commas."
MAX_SEARCHES = 4
NOTHING = "nothing"


class Note(TypedDict):
    """What one searcher found."""

    query: str
    hits: list[str]
    found: str


class Search(TypedDict, total=False):
    """What one searcher knows. ``place`` is the search's number in the plan."""

    place: int
    query: str
    hits: list[str]
    notes: Annotated[list[tuple[int, Note]], operator.add]


class State(TypedDict, total=False):
    """What the graph knows: ``question`` comes in, ``report`` goes out."""

    question: str
    plan: list[str]
    notes: Annotated[list[tuple[int, Note]], operator.add]
    report: str


def documents(query: str, hits: list[str]) -> str:
    """What the reader is shown."""
    return "\n".join([query, *(hits or ["No documents."])])


def findings(question: str, notes: list[tuple[int, Note]]) -> str:
    """What the writer is shown: the notes in the order of the plan."""
    ordered = [note for _, note in sorted(notes, key=lambda placed: placed[0])]
    return "\n".join([question, *(f"{note['query']}: {note['found']}" for note in ordered)])


def searches(reply: str) -> list[str]:
    """The searches in a planner's reply: its lines, without bullets."""
    lines = [line.strip(" -*•\t") for line in reply.splitlines()]
    return [line for line in lines if line][:MAX_SEARCHES]


def build_searcher(model: BaseChatModel) -> CompiledStateGraph[Search, Corpus, Search, Search]:
    """One searcher: look up a query in the corpus, read what was found."""

    async def look_up(state: Search, runtime: Runtime[Corpus]) -> Search:
        return {"hits": runtime.context.search(state["query"])}

    async def read(state: Search) -> Search:
        shown = documents(state["query"], state["hits"])
        reply = await model.ainvoke([("system", READ), ("user", shown)])
        note = Note(query=state["query"], hits=state["hits"], found=reply.text.strip(" .\n"))
        return {"notes": [(state["place"], note)]}

    graph = StateGraph(Search, context_schema=Corpus)
    graph.add_node("look_up", look_up)
    graph.add_node("read", read)
    graph.add_edge(START, "look_up")
    graph.add_edge("look_up", "read")
    graph.add_edge("read", END)
    return graph.compile()


def build_agent(model: BaseChatModel) -> CompiledStateGraph[State, Corpus, State, State]:
    """Build the agent as a LangGraph graph; one serves all runs.

    Args:
        model: Any chat model.

    Returns:
        The graph, to be run with `await agent.ainvoke({"question": …}, context=corpus)`. Its nodes
        are coroutines, so `invoke` does not work.

    Example:
        >>> agent = build_agent(model)  # doctest: +SKIP
        >>> state = await agent.ainvoke(
        ...     {"question": scenario.question}, context=world.corpus
        ... )  # doctest: +SKIP
        >>> reward(scenario, state["report"])  # doctest: +SKIP
        1.0
    """

    async def plan(state: State) -> State:
        reply = await model.ainvoke([("system", PLAN), ("user", state["question"])])
        return {"plan": searches(reply.text)}

    def fan_out(state: State) -> list[Send] | str:
        sent = [Send("search", Search(place=at, query=q)) for at, q in enumerate(state["plan"])]
        return sent or "write"

    async def write(state: State) -> State:
        shown = findings(state["question"], state.get("notes", []))
        reply = await model.ainvoke([("system", WRITE), ("user", shown)])
        return {"report": reply.text}

    graph = StateGraph(State, context_schema=Corpus)
    graph.add_node("plan", plan)
    graph.add_node("search", build_searcher(model))
    graph.add_node("write", write)
    graph.add_edge(START, "plan")
    graph.add_conditional_edges("plan", fan_out, ["search", "write"])
    graph.add_edge("search", "write")
    graph.add_edge("write", END)
    return graph.compile()
