"""Three tasks on SmolLM2-135M-Instruct: one call, a router with two specialists, several turns.

- `triage`: the example's router names one of four departments.
- `desk`: a router chooses the desk for money or for goods; that desk's specialist then names one of
  its two departments. The run's reward is 1 if the department is right, 0.4 if only the desk is.
- `guess`: a number from 1 to 7 in three guesses, each answered by *too low* or *too high*. The
  reward is 1 for a hit, else up to 0.5 by how near the last guess is.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel

from examples.triage.tickets import Department, Ticket, tickets
from examples.triage.train import make_rollout
from langchain_art import ChatART, Run, capture

Rollout = Callable[[Any], Awaitable[Run]]
NODES = ("desk", "money", "goods")


@dataclass(frozen=True)
class Task:
    """A task of the benchmark.

    Attributes:
        rollout: Makes the rollout of the chat models of `nodes`.
        scenarios: Training or held-out scenarios, of a seed.
        target: Mean training reward of the last 384 runs at which a fit has arrived.
        steps: Of a fit.
        held_out: Scenarios of its two evaluations.
        nodes: Calls of the graph; each may have a policy of its own.
        max_tokens: Of one reply.
    """

    rollout: Callable[[Mapping[str, ChatART]], Rollout]
    scenarios: Callable[[Literal["train", "test"], int, int], Sequence[Any]]
    target: float
    steps: int
    held_out: int = 96
    nodes: tuple[str, ...] = ("agent",)
    max_tokens: int = 48


def _triage(models: Mapping[str, ChatART]) -> Rollout:
    return make_rollout(models["agent"])


class Desk(BaseModel):
    desk: Literal["money", "goods"]


class Money(BaseModel):
    department: Literal["billing", "account"]


class Goods(BaseModel):
    department: Literal["technical", "shipping"]


DESKS: dict[Department, str] = {
    "billing": "money", "account": "money", "technical": "goods", "shipping": "goods",
}  # fmt: skip
PROMPTS = {
    "desk": "You sort messages of customers. The desk for money answers what is about payments and "
    "logins, the desk for goods what is about devices and parcels. Answer with JSON.",
    "money": "You sort messages about payments (billing) and logins (account). Name the "
    "department. Answer with JSON.",
    "goods": "You sort messages about devices (technical) and parcels (shipping). Name the "
    "department. Answer with JSON.",
}


class DeskState(TypedDict, total=False):
    message: str
    desk: str
    department: str


def _desk(models: Mapping[str, ChatART]) -> Rollout:
    graph = StateGraph(DeskState)

    def node(name: str, schema: type[BaseModel]) -> Callable[[DeskState], Awaitable[DeskState]]:
        model = models[name].with_structured_output(schema)

        async def call(state: DeskState) -> DeskState:
            asked = [SystemMessage(PROMPTS[name]), HumanMessage(state.get("message", ""))]
            found = await model.ainvoke(asked)
            assert isinstance(found, BaseModel)
            return DeskState(**found.model_dump())

        return call

    for name, schema in zip(NODES, (Desk, Money, Goods), strict=True):
        graph.add_node(name, node(name, schema))
    graph.add_edge(START, "desk")
    graph.add_conditional_edges("desk", lambda state: state.get("desk"), ["money", "goods"])
    graph.add_edge("money", END)
    graph.add_edge("goods", END)
    agent = graph.compile()

    async def rollout(ticket: Ticket) -> Run:
        async with capture(scenario=ticket.id) as run:
            state = await agent.ainvoke({"message": ticket.message})
            right = state.get("department") == ticket.department
            run.reward = 1.0 if right else 0.4 * (state.get("desk") == DESKS[ticket.department])
        return run

    return rollout


class Guess(BaseModel):
    guess: Literal["1", "2", "3", "4", "5", "6", "7"]


@dataclass(frozen=True)
class Secret:
    id: str
    number: int


class GuessState(TypedDict, total=False):
    number: int
    messages: list[AnyMessage]
    last: int


GUESSES, HIGHEST = 3, 7


def _guess(models: Mapping[str, ChatART]) -> Rollout:
    model = models["agent"].with_structured_output(Guess, include_raw=True)

    async def ask(state: GuessState) -> GuessState:
        before = state.get("messages") or [
            SystemMessage("Find the number from 1 to 7. Answer with JSON."),
            HumanMessage("What is your first guess?"),
        ]
        found: Any = await model.ainvoke(before)
        number, guess = state.get("number", 0), int(found["parsed"].guess)
        said = "low" if guess < number else "high"
        answer = HumanMessage(f"Too {said}.")
        return GuessState(messages=[*before, found["raw"], answer], last=guess)

    def over(state: GuessState) -> str:
        asked = sum(one.type == "ai" for one in state.get("messages", []))
        return END if state.get("last") == state.get("number") or asked == GUESSES else "ask"

    graph = StateGraph(GuessState)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", over, ["ask", END])
    agent = graph.compile()

    async def rollout(secret: Secret) -> Run:
        async with capture(scenario=secret.id) as run:
            state = await agent.ainvoke({"number": secret.number})
            away = min(abs(state["last"] - secret.number), HIGHEST - 1)
            run.reward = 1.0 if not away else 0.5 - 0.5 * away / (HIGHEST - 1)
        return run

    return rollout


def _secrets(split: str, count: int, seed: int) -> list[Secret]:
    drawn = random.Random(f"{split}:{seed}")
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += drawn.sample(range(1, HIGHEST + 1), HIGHEST)
    return [Secret(f"{split}-{seed}-{n}", number) for n, number in enumerate(numbers[:count])]


TASKS = {
    "triage": Task(_triage, tickets, 0.60, steps=40),
    "desk": Task(_desk, tickets, 0.45, steps=30, nodes=NODES),
    "guess": Task(_guess, _secrets, 0.70, steps=20, held_out=49, max_tokens=16),
}
