"""Train the triage agent: ``python -m examples.triage.train``.

The base model is a pretrained one, SmolLM2-135M-Instruct, and nothing of the fit is set: the rate,
the bound on a step and the sizes are the defaults of `Trainer` and `TrainConfig`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import typer
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from examples.support.command import train_command
from examples.support.demo import Fit, Setup, pretrained_demo
from examples.triage.agent import Route, build_agent
from examples.triage.tickets import Ticket, tickets
from langchain_art import ChatART, Run, capture

Rollout = Callable[[Ticket], Awaitable[Run]]
#: Messages to learn from; each comes again after as many steps as they fill.
MESSAGES = 288


def make_rollout(model: ChatART, shots: Sequence[BaseMessage] = ()) -> Rollout:
    """The user's part: run the graph on a message, say whether the right department has it."""
    agent = build_agent(model, shots)

    async def rollout(ticket: Ticket) -> Run:
        async with capture(scenario=ticket.id) as run:
            state = await agent.ainvoke({"message": ticket.message})
            run.reward = float(state.get("department") == ticket.department)
        return run

    return rollout


def solved(ticket: Ticket) -> list[BaseMessage]:
    """A message and the reply that it should get."""
    reply = Route(department=ticket.department).model_dump_json()
    return [HumanMessage(ticket.message), AIMessage(reply)]


def build_fit(setup: Setup) -> Fit:
    """Messages of the setup's seed; held-out ones tell other problems."""
    model, train = setup.chat(), tickets("train", MESSAGES, setup.seed)
    return Fit(
        trainer=setup.trainer([model]),
        rollout=make_rollout(model, setup.shots(train)),
        train=train,
        held_out=tickets("test", setup.demo.held_out, setup.seed),
    )


DEMO = pretrained_demo(
    name="triage",
    title="Triage",
    policies=("triage",),
    build=build_fit,
    solved=solved,
)

main = train_command(DEMO, "Train a pretrained model to route the messages of customers.")

if __name__ == "__main__":
    typer.run(main)
