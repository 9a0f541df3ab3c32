"""The agent: search, open, answer. Nothing in it knows of training."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph

from examples.documentation.pages import Index, pages, words

PROMPT = "Answer the question from Python's documentation. Reply with JSON."
SEARCH = "Which of its words shall be searched for?"
OPEN = "Which of these pages tells it?"


class State(TypedDict):
    """A question on its way."""

    does: str
    parameter: str
    messages: Annotated[list[AnyMessage], add_messages]
    hits: list[str]
    opened: str
    answer: str


def build_agent(model: BaseChatModel) -> CompiledStateGraph:
    """Build the agent: ``await agent.ainvoke({"does": …, "parameter": …})`` has the `answer`.

    Each reply is a choice among what is there: words of the question, pages that were found, values
    on the page that was opened. So nothing is answered that no page says.

    Args:
        model: any chat model with structured output.
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
        question = f"{state['does']}: what is the default of {state['parameter']}?"
        asked = [SystemMessage(PROMPT), HumanMessage(f"{question}\n{SEARCH}")]
        word, reply = await choose(asked, "search", words(state["does"]))
        hits = index.search(word)
        shown = "\n".join([OPEN, *(page.hit for page in hits)])
        return {
            "hits": [page.name for page in hits],
            "messages": [*asked, reply, HumanMessage(shown)],
        }

    async def open_page(state: State) -> dict[str, Any]:
        name, reply = await choose(state["messages"], "open", state["hits"])
        shown = f"{pages()[name]}\nWhat is the default of {state['parameter']}?"
        return {"opened": name, "messages": [reply, HumanMessage(shown)]}

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
