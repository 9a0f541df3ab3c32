"""Train the deep agent: ``python -m examples.deep_agent.train``.

The reward is reasoning-gym's, for the answer alone. All calls of a run, those of the sub-agent
too, get its advantage; ``calls.py`` says what each kind of call made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from examples.deep_agent.agent import build_agent
from examples.deep_agent.calls import learned
from examples.deep_agent.environment import haystacks
from examples.support.command import Given, train_command
from examples.support.demo import Demo, Fit, Setup
from langchain_art import ArtClient, FitResult, Run
from langchain_art.environments import from_reasoning_gym

BASE_MODEL = Path(__file__).parent / "base_model"
POLICY = "deep-agent"
#: Tasks of one seed of the demo; those of another are others.
TASKS = 100_000


@dataclass(frozen=True)
class Scenario:
    """A task of the environment."""

    id: str
    task: dict[str, Any]


def build_fit(setup: Setup) -> Fit:
    """Haystacks of the setup's seed, and the deep agent that is asked about them."""
    held_out = setup.demo.held_out
    dataset = haystacks(setup.seed * TASKS, setup.train_scenarios + held_out)
    model = setup.chat()
    env = from_reasoning_gym(dataset, build_agent(model), held_out=held_out)

    async def rollout(scenario: Scenario) -> Run:
        return await env.rollout(scenario.task)

    return Fit(
        trainer=setup.trainer([model]),
        rollout=rollout,
        train=[Scenario(task["id"], task) for task in env.train],
        held_out=[Scenario(task["id"], task) for task in env.held_out],
    )


DEMO = Demo(
    name="deep-agent",
    title="Deep agent",
    base_model=BASE_MODEL,
    policies=(POLICY,),
    build=build_fit,
    max_tokens=64,
)


def told(result: FitResult, _: Any, client: ArtClient) -> Mapping[str, Any]:
    """The kinds of calls, printed, and for ``summary.json``."""
    kinds = learned(result.history, client)
    for kind in kinds:
        first, last = kind.shares
        print(
            f"{kind.agent}: {kind.action}: {first:.0%} → {last:.0%} of its calls; "
            f"{kind.calls:,} trained, {kind.tokens:,} tokens, advantage {kind.advantage:+.2f}"
        )
    return {"calls": [asdict(kind) for kind in kinds]}


def options(given: Given) -> dict[str, Any]:
    """No option of its own: what the calls learned is shown."""
    return {"more": told}


main = train_command(DEMO, "Train a small deep agent to delegate, search a file, answer.", options)

if __name__ == "__main__":
    typer.run(main)
