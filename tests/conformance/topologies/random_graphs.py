"""Random LangGraph programs, and what each does with every model call that it makes.

A program is a tree: groups of parts that run one after the other, beside each other, or once per
`Send`; its leaves are nodes that make up to three calls. Groups are subgraphs. Nodes and groups may
fail once and be retried, nodes may wait for a person, calls may fail in a chain with a fallback.
Prompts and replies come from two words, so that equal ones meet. A group that holds a waiting node
is not retried: once resumed, LangGraph goes on from the attempt that had failed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send, interrupt

from tests.conformance.suite.harness import Kit
from tests.conformance.suite.nodes import RETRY, Failing, talk
from tests.conformance.suite.scripts import script

Kind = Literal["state", "anew", "on", "fork", "shaky"]


@dataclass(frozen=True)
class Node:
    """A leaf."""

    calls: tuple[tuple[Kind, str], ...]
    """How each call's prompt is made, and what it says."""
    fate: Literal["ends", "fails once", "asks"] = "ends"


@dataclass(frozen=True)
class Group:
    """A subgraph. Of ``send``, the first part is run twice; if that is a group, it runs once."""

    shape: Literal["line", "beside", "send"]
    parts: tuple[Node | Group, ...]
    retried: bool = False

    @property
    def asks(self) -> bool:
        """Whether a node in it waits for a person."""
        return any(p.asks if isinstance(p, Group) else p.fate == "asks" for p in self.parts)


def programs() -> st.SearchStrategy[Group]:
    """Nodes in groups, up to three deep."""
    kinds: st.SearchStrategy[Kind] = st.sampled_from(["state", "anew", "on", "fork", "shaky"])
    call = st.tuples(kinds, st.sampled_from(["ay", "bee"]))
    calls = st.integers(-3, 3).flatmap(
        lambda number: st.tuples(*[call] * abs(number))  # seldom none at all
    )
    fates = st.sampled_from(["ends", "ends", "fails once", "asks"])
    nodes: st.SearchStrategy[Any] = st.builds(Node, calls, fates)

    def groups(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        shapes = st.sampled_from(["line", "beside", "send"])
        several = st.lists(parts, min_size=1, max_size=3).map(tuple)
        return st.builds(Group, shapes, several, st.booleans()).map(
            lambda group: replace(group, retried=group.retried and not group.asks)
        )

    tree = groups(nodes) | groups(nodes | groups(nodes))
    return st.tuples(tree, nodes).map(lambda parts: Group("line", parts))


@dataclass
class Fate:
    """What the program itself knows of one call."""

    path: str
    excluded: bool = False


@dataclass
class Made:
    """One call of a node."""

    id: str
    prompt: list[Any]
    reply: AIMessage


def passed_over(made: list[Made], said: list[Any]) -> list[Made]:
    """Calls whose prompt another call of the node had too, whose reply the node passes on."""
    went_on = [*said, *(call.prompt[-2] for call in made if len(call.prompt) > 1)]
    return [
        call
        for call in made
        if not any(call.reply is message for message in went_on)
        and any(
            other.reply in said
            and [m.content for m in other.prompt] == [m.content for m in call.prompt]
            for other in made
            if other is not call
        )
    ]


@dataclass
class Played:
    """A program, made runnable. `fates` fills while it runs: call id -> what became of it."""

    kit: Kit
    program: Group
    fates: dict[str, Fate] = field(default_factory=dict[str, Fate])
    _names: Iterator[int] = field(default_factory=count)

    def compiled(self, saver: Any) -> Any:
        """The program's graph."""
        return self._graph(self.program, "").compile(checkpointer=saver)

    def _graph(self, group: Group, above: str) -> StateGraph[Any]:
        graph = StateGraph(MessagesState)
        names: list[str] = []
        for part in group.parts[: 1 if group.shape == "send" else None]:
            name = f"{'n' if isinstance(part, Node) else 'g'}{next(self._names)}"
            path = f"{above}/{name}".lstrip("/")
            is_node = isinstance(part, Node)
            does = self._node(part, path) if is_node else self._graph(part, path).compile()
            fails = part.fate == "fails once" if is_node else part.retried
            graph.add_node(name, does, retry_policy=RETRY if fails else None)
            if group.shape == "send":
                graph.add_conditional_edges(START, _twice(name, is_node), [name])
            else:
                graph.add_edge(names[-1] if names and group.shape == "line" else START, name)
            names.append(name)
        if group.retried and above:
            ends = names[-1:] if group.shape == "line" else names
            graph.add_node("trips", self._trips(above)).add_edge(ends, "trips")
        return graph

    def _trips(self, path: str) -> Any:
        """Fails once; then all that was done in its group so far is done again."""
        failing = Failing(1)

        def trips(state: Any) -> None:
            try:
                failing()
            except ConnectionError:
                for fate in list(self.fates.values()):
                    fate.excluded |= fate.path.startswith(f"{path}/")
                raise

        return trips

    def _node(self, node: Node, path: str) -> Any:
        failing = Failing(node.fate == "fails once")

        def body(state: Any) -> Generator[Any, AIMessage, Any]:
            made: list[Made] = []
            said: list[Any] = []
            try:
                for kind, word in node.calls:
                    asks = HumanMessage(script(word))
                    # A conversation's past; `fork` leaves out the latest question and its reply.
                    past = {"on": said, "fork": said[:-2], "state": state["messages"]}.get(kind, [])
                    prompt = [*past, asks]
                    how = self._shaky(path) if kind == "shaky" else None
                    reply = yield (how, prompt) if how else prompt
                    made.append(Made(self._note(reply, path), prompt, reply))
                    said = [*prompt, reply]
                if node.fate == "asks":
                    interrupt("Shall I?")
                failing()
            except BaseException:
                for call in made:
                    self.fates[call.id].excluded = True
                raise
            for call in passed_over(made, said):
                self.fates[call.id].excluded = True
            return {"messages": [message.model_copy() for message in said]}

        return talk(self.kit, body)

    def _shaky(self, path: str) -> Runnable[Any, Any]:
        """The model in a chain that fails after it, and the model again."""

        def breaks(reply: AIMessage) -> None:
            self.fates[self._note(reply, path)].excluded = True
            raise ValueError("broken")

        model = self.kit.model
        return (model | RunnableLambda(breaks)).with_fallbacks([model])

    def _note(self, reply: AIMessage, path: str) -> str:
        id = reply.response_metadata["call_id"]
        self.fates[id] = Fate(path)
        return id


def _twice(name: str, is_node: bool) -> Any:
    return lambda state: [Send(name, state)] * (2 if is_node else 1)
