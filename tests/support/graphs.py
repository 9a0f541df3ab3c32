"""Small graphs, and a chat model that says what a test wants."""

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import RetryPolicy


class Answering(BaseChatModel):
    """A chat model that answers by `choices`, which a subclass writes."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def choices(self, messages: Any) -> list[AIMessage]:
        """The replies to a request."""
        raise NotImplementedError

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        said = self.choices(messages)
        return ChatResult(generations=[ChatGeneration(message=reply) for reply in said])


class Scripted(Answering):
    """Says the next line; the last one again and again."""

    lines: list[Any]

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=[{"type": "function", "function": {"name": t.name}} for t in tools])

    def choices(self, messages: Any) -> list[AIMessage]:
        line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        return [AIMessage(line) if isinstance(line, str) else line.model_copy(update={"id": None})]


def node(model: BaseChatModel) -> Any:
    return lambda state: {"messages": [model.invoke(state["messages"])]}


def graph_of(**nodes: Any) -> StateGraph[Any]:
    """A chain of nodes."""
    graph = StateGraph(MessagesState).add_sequence(list(nodes.items()))
    return graph.add_edge(START, next(iter(nodes))).add_edge([*nodes][-1], END)


ASK = {"messages": [("user", "hi")]}


class Flaky:
    """Fails until its third time."""

    def __init__(self, then: Any) -> None:
        self.times, self.then = 0, then

    def __call__(self, state: MessagesState) -> Any:
        self.times += 1
        out = self.then(state)
        if self.times < 3:
            raise ConnectionError("flaky")
        return out


RETRY = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=ConnectionError)
