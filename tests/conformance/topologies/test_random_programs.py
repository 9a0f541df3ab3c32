"""Whatever a program does with its replies: those learn that it kept, as a slow oracle says.

A program is a graph. Its nodes ask a model, or a model around it; ask again until a reply is good
enough; let chains, tools, models and nodes fail and go on; ask a person; and return what they kept
in any form. The oracle is the program: it notes each reply that it keeps, and strikes out what it
throws away.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt

from langchain_art import capture
from tests.support.graphs import Answering
from tests.support.soak import count

PROGRAMS = count(20, 3000)
RETRY = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=ConnectionError)


class Numbered(Answering):
    """Says another thing each time, as JSON, and names its calls as our server does."""

    said: list[str]

    def choices(self, messages: Any) -> list[AIMessage]:
        self.said.append(f"call-{uuid4()}")
        text = json.dumps({"answer": f"answer {len(self.said)} of them", "mark": len(self.said)})
        return [AIMessage(text, response_metadata={"call_id": self.said[-1]})]


class Around(Answering):
    """Asks another model; fails afterwards as often as it is told."""

    inner: BaseChatModel
    failures: list[int]

    def choices(self, messages: Any) -> list[AIMessage]:
        return [fails(self.failures, self.inner.invoke(messages))]


def fails(times: list[int], reply: AIMessage) -> AIMessage:
    if times[0] > 0:
        times[0] -= 1
        raise ConnectionError("after the answer")
    return reply


FORMS: list[Callable[[AIMessage], Any]] = [
    lambda reply: reply,
    lambda reply: AIMessage(reply.text),
    lambda reply: ("ai", reply.text),
    lambda reply: {"role": "assistant", "content": reply.text},
    lambda reply: ("ai", f"So: {reply.text}"),
    lambda reply: ("ai", json.loads(reply.text)["answer"]),
]


@dataclass
class Played:
    """A program that is drawn while it runs, and what it keeps."""

    draw: random.Random
    model: Numbered = field(default_factory=lambda: Numbered(said=[]))
    kept: set[str] = field(default_factory=set[str])
    first: set[str] = field(default_factory=set[str])
    serial: int = 0

    def asked(self) -> list[Any]:
        self.serial += 1
        return [HumanMessage(f"question {self.serial}")]

    def several(self, model: BaseChatModel) -> list[AIMessage]:
        question = self.asked()
        return [model.invoke(question) for _ in range(self.draw.randint(2, 4))]

    def retried(self, parse: bool) -> AIMessage:
        """A chain or a model that fails after the answer, at times around a model around it."""
        times = [self.draw.randint(0, 2)]
        asks: Runnable[Any, Any] = Around(inner=self.model, failures=times)
        if parse:
            asks = self.model | RunnableLambda(lambda reply: fails(times, reply))
        elif self.draw.random() < 0.3:
            asks = Around(inner=asks, failures=[0])  # type: ignore[arg-type]
        return asks.with_retry(wait_exponential_jitter=False).invoke(self.asked())

    def fallback(self) -> AIMessage:
        first = self.model | RunnableLambda(lambda reply: fails([1], reply))
        return first.with_fallbacks([self.model]).invoke(self.asked())

    def in_a_tool(self) -> AIMessage:
        """A tool whose error the node handles: what it asked was thrown away with it."""
        times, said = [self.draw.randint(0, 1)], list[AIMessage]()

        @tool
        def ask() -> str:
            """Ask."""
            said.append(self.model.invoke(self.asked()))
            return fails(times, said[-1]).text

        try:
            ask.invoke({})
        except ConnectionError:
            return self.model.invoke(self.asked())
        return said[-1]

    def step(self) -> AIMessage:
        """One step of a node: asks, and gives the reply that it goes on with."""
        steps: list[Callable[[], AIMessage]] = [
            lambda: self.model.invoke(self.asked()),
            lambda: self.several(self.model)[-1],
            lambda: self.draw.choice(self.several(self.model)),
            lambda: self.several(Around(inner=self.model, failures=[0]))[-1],
            lambda: self.retried(parse=True),
            lambda: self.retried(parse=False),
            self.fallback,
            self.in_a_tool,
        ]
        reply = self.draw.choice(steps)()
        self.kept.add(reply.response_metadata["call_id"])
        return reply

    def node(self) -> Any:
        """A node of some steps that may fail once, and may ask a person once between two of them.

        The replies of an attempt that is made again are thrown away.
        """
        times, asks = [int(self.draw.random() < 0.25)], self.draw.random() < 0.3
        steps, form = self.draw.randint(1, 3), self.draw.choice(FORMS)

        def body(state: Any) -> Any:
            before = self.kept.copy()
            try:
                replies = [self.step() for _ in range(steps)]
                if asks:
                    interrupt("Shall I?")
                replies += [self.step() for _ in range(steps - 1)]
                fails(times, replies[0])
            except BaseException:
                self.kept = before
                raise
            return {"messages": [form(reply) for reply in replies]}

        return body

    def sub_agents(self) -> Any:
        """A node with a sub-agent, a question to a person, and another sub-agent.

        With memory each runs once; without it the first runs again, and what it said is lost.
        """
        memory: Any = self.draw.choice([None, False])
        number = self.draw.randint(1, 2)

        def agent() -> Any:
            def asks(state: Any) -> Any:
                return {"messages": [self.step()]}

            graph = StateGraph(MessagesState).add_node("model", asks).add_edge(START, "model")
            return graph.compile(checkpointer=memory)

        first, second = [agent() for _ in range(number)], agent()
        asked: list[bool] = []

        def body(state: Any) -> Any:
            before = self.kept.copy()
            if asked and memory is False:
                self.kept = before = before - self.first
            for one in first:
                one.invoke({"messages": []})
            if not asked:
                asked.append(True)
                self.first = self.kept - before
            interrupt("Shall I?")
            return {"messages": second.invoke({"messages": []})["messages"][-1:]}

        return body

    def run(self) -> Any:
        """The captured run of the program's graph, which answers whatever it asks."""
        graph, last = StateGraph(MessagesState), START
        for name in "abc"[: self.draw.randint(1, 3)]:
            body = self.sub_agents() if self.draw.random() < 0.3 else self.node()
            graph.add_node(name, body, retry_policy=RETRY).add_edge(last, name)
            last = name
        agent, config = graph.compile(InMemorySaver()), {"configurable": {"thread_id": "1"}}
        given: Any = {"messages": []}
        with capture() as run:
            while given is not None:
                agent.invoke(given, config)  # type: ignore[arg-type]
                waiting = agent.get_state(config).interrupts  # type: ignore[arg-type]
                given = Command(resume={one.id: "yes" for one in waiting}) if waiting else None
        return run


@pytest.mark.soak
@pytest.mark.timeout(count(300, 3600))
def test_what_learns_is_what_the_program_kept() -> None:
    for seed in range(PROGRAMS):
        played = Played(random.Random(seed))
        run = played.run()
        learning = {turn.call_id for turn in run.turns if turn.excluded_because is None}
        assert run.status == "completed", (seed, run.error)
        heard = [turn.call_id for turn in run.turns if turn.call_id or not turn.error]
        assert sorted(heard) == sorted(played.model.said), seed
        assert learning == played.kept, (
            seed,
            [(t.call_id, t.path, t.excluded_because) for t in run.turns],
        )
