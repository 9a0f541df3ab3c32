"""Whatever a program does with its replies: those learn that it kept, as a slow oracle says.

A program is a graph, run in the body of one of two generators that are read in turns. Its nodes
ask a model, a model around the model, or a sub-agent; ask again until a reply is good enough; let
chains, tools, models and nodes fail and go on; ask a person; and return what they kept in any form.
The oracle is the program: it notes each reply that it keeps, and strikes out what it throws away.
"""

import json
import random
from collections.abc import Callable, Iterator
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
        reply = self.inner.invoke(messages)
        if self.failures[0] > 0:
            self.failures[0] -= 1
            raise ConnectionError("after the answer")
        return [reply]


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
    serial: int = 0

    def asked(self) -> list[Any]:
        self.serial += 1
        return [HumanMessage(f"question {self.serial}")]

    def keep(self, reply: AIMessage) -> AIMessage:
        self.kept.add(reply.response_metadata["call_id"])
        return reply

    # ---- one step of a node: asks, and gives the reply that it goes on with

    def plain(self) -> AIMessage:
        return self.keep(self.model.invoke(self.asked()))

    def again(self) -> AIMessage:
        """Asks until it is good enough."""
        question, times = self.asked(), self.draw.randint(2, 4)
        return self.keep([self.model.invoke(question) for _ in range(times)][-1])

    def best(self) -> AIMessage:
        question, times = self.asked(), self.draw.randint(2, 4)
        return self.keep(self.draw.choice([self.model.invoke(question) for _ in range(times)]))

    def retried(self) -> AIMessage:
        """A chain that fails after the answer."""
        failures = [self.draw.randint(0, 2)]

        def parse(reply: AIMessage) -> AIMessage:
            if failures[0] > 0:
                failures[0] -= 1
                raise ConnectionError("no parse")
            return reply

        chain: Runnable[Any, Any] = (self.model | RunnableLambda(parse)).with_retry(
            wait_exponential_jitter=False
        )
        return self.keep(chain.invoke(self.asked()))

    def fallback(self) -> AIMessage:
        def breaks(reply: AIMessage) -> AIMessage:
            raise ValueError("broken")

        first: Runnable[Any, Any] = self.model | RunnableLambda(breaks)
        return self.keep(first.with_fallbacks([self.model]).invoke(self.asked()))

    def around(self) -> AIMessage:
        """A model around the model, at times around a model around it."""
        outer: Any = Around(inner=self.model, failures=[self.draw.randint(0, 2)])
        if self.draw.random() < 0.3:
            outer = Around(inner=outer, failures=[0])
        return self.keep(outer.with_retry(wait_exponential_jitter=False).invoke(self.asked()))

    def around_again(self) -> AIMessage:
        outer, question = Around(inner=self.model, failures=[0]), self.asked()
        return self.keep([outer.invoke(question) for _ in range(3)][-1])

    def in_a_tool(self) -> AIMessage:
        """A tool whose error the node handles: what it asked was thrown away with it."""
        fails, said = self.draw.random() < 0.5, list[AIMessage]()

        @tool
        def ask() -> str:
            """Ask."""
            said.append(self.model.invoke(self.asked()))
            if fails:
                raise ValueError("stuck")
            return "fine"

        try:
            ask.invoke({})
        except ValueError:
            return self.plain()
        return self.keep(said[-1])

    STEPS = (plain, again, best, retried, fallback, around, around_again, in_a_tool)

    # ---- nodes

    def step(self) -> AIMessage:
        return self.draw.choice(self.STEPS)(self)

    def node(self) -> tuple[Any, RetryPolicy | None]:
        """A node of some steps that may fail once, and may ask a person once between two of them.

        The replies of an attempt that is made again are thrown away.
        """
        fails = [self.draw.random() < 0.25]
        asks = self.draw.random() < 0.3
        steps, form = self.draw.randint(1, 3), self.draw.choice(FORMS)

        def body(state: Any) -> Any:
            before = self.kept.copy()
            try:
                replies = [self.step() for _ in range(steps)]
                if asks:
                    interrupt("Shall I?")
                replies += [self.step() for _ in range(steps - 1)]
                if fails.pop() if fails else False:
                    raise ConnectionError("not now")
            except BaseException:
                self.kept = before
                raise
            return {"messages": [form(reply) for reply in replies]}

        return body, RetryPolicy(initial_interval=0.001, jitter=False, retry_on=ConnectionError)

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

    def graph(self) -> Any:
        graph, last = StateGraph(MessagesState), START
        for number in range(self.draw.randint(1, 3)):
            name = f"n{number}"
            if self.draw.random() < 0.3:
                graph.add_node(name, self.sub_agents())
            else:
                body, retry = self.node()
                graph.add_node(name, body, retry_policy=retry)
            graph.add_edge(last, name)
            last = name
        return graph.compile(checkpointer=InMemorySaver())

    def run(self) -> Iterator[Any]:
        """Captures the graph's run, in the body of a generator."""
        config: Any = {"configurable": {"thread_id": "1"}}
        with capture() as run:
            agent = self.graph()
            given: Any = {"messages": []}
            while given is not None:
                for _ in agent.stream(given, config):
                    yield run
                waiting = agent.get_state(config).interrupts
                given = Command(resume={one.id: "yes" for one in waiting}) if waiting else None
            yield run


@pytest.mark.soak
@pytest.mark.timeout(count(300, 3600))
def test_what_learns_is_what_the_program_kept() -> None:
    stranger = Numbered(said=[])
    for seed in range(0, PROGRAMS, 2):
        draw = random.Random(seed)
        programs = [Played(random.Random(seed)), Played(random.Random(seed + 1))]
        reading = [(played, played.run()) for played in programs]
        runs: dict[int, Any] = {}
        while reading:
            played, body = draw.choice(reading)
            if (run := next(body, None)) is None:
                reading.remove((played, body))
            else:
                runs[id(played)] = run
            stranger.invoke("between")
        for played in programs:
            run = runs[id(played)]
            learning = {turn.call_id for turn in run.turns if turn.excluded_because is None}
            assert run.status == "completed", (seed, run.error)
            heard = [turn.call_id for turn in run.turns if turn.call_id or not turn.error]
            assert sorted(heard) == sorted(played.model.said), seed
            assert learning == played.kept, (
                seed,
                [(t.call_id, t.path, t.excluded_because) for t in run.turns],
            )
