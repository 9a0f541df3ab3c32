"""The agent: search, open, answer. Nothing in it knows of training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, BaseMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph

from examples.documentation.pages import Index, Page, pages, words

PROMPT = "Answer the question from Python's documentation. Reply with JSON."


class State(TypedDict):
    """A question on its way."""

    does: str
    parameter: str
    messages: Annotated[list[AnyMessage], add_messages]
    hits: list[str]
    opened: str
    answer: str


def ask_search(does: str, parameter: str, counts: dict[str, int]) -> HumanMessage:
    """Ask for a word, of those that stand in so many pages."""
    question = f"{does}: what is the default of {parameter}?"
    search = "Which of its words shall be searched for? The number of pages that have it:"
    return HumanMessage("\n".join([question, search, *(f"{w}: {n}" for w, n in counts.items())]))


def ask_open(hits: Iterable[Page]) -> HumanMessage:
    """Ask for one of the pages that were found."""
    return HumanMessage("\n".join(["Which of these pages tells it?", *(one.hit for one in hits)]))


def ask_answer(page: str, parameter: str) -> HumanMessage:
    """Show a page and ask for the answer."""
    return HumanMessage(f"{pages()[page]}\nWhat is the default of {parameter}?")


def build_agent(model: BaseChatModel, shots: Sequence[BaseMessage] = ()) -> CompiledStateGraph:
    """Build the agent: ``await agent.ainvoke({"does": …, "parameter": …})`` has the `answer`.

    Each reply is a choice among what is there: words of the question, pages that were found, values
    on the page that was opened. So nothing is answered that no page says.

    Args:
        model: any chat model with structured output.
        shots: answered questions that each prompt begins with.
    """
    index = Index()

    async def choose(messages: list[Any], name: str, options: list[str]) -> tuple[str, AnyMessage]:
        schema = {
            "title": name,
            "type": "object",
            "properties": {name: {"type": "string", "enum": options}},
            "required": [name],
            "additionalProperties": False,
        }
        chooser = model.with_structured_output(schema, include_raw=True)
        found = await chooser.ainvoke(messages)
        if found["parsed"] is None:
            raise found["parsing_error"]
        return found["parsed"][name], found["raw"]

    async def search(state: State) -> dict[str, Any]:
        counts = index.counts(words(state["does"]))
        question = ask_search(state["does"], state["parameter"], counts)
        asked = [SystemMessage(PROMPT), *shots, question]
        word, reply = await choose(asked, "search", [*counts])
        hits = index.search(word)
        return {
            "hits": [page.name for page in hits],
            "messages": [*asked, reply, ask_open(hits)],
        }

    async def open_page(state: State) -> dict[str, Any]:
        name, reply = await choose(state["messages"], "open", state["hits"])
        return {"opened": name, "messages": [reply, ask_answer(name, state["parameter"])]}

    async def answer(state: State) -> dict[str, Any]:
        values = [*dict.fromkeys(pages()[state["opened"]].defaults.values())]
        value, reply = await choose(state["messages"], "answer", values)
        return {"answer": value, "messages": [reply]}

    graph = StateGraph(State)
    graph.add_node("search", search)
    graph.add_node("open", open_page)
    graph.add_node("answer", answer)
    graph.add_edge(START, "search")
    graph.add_edge("search", "open")
    graph.add_edge("open", "answer")
    graph.add_edge("answer", END)
    return graph.compile()
