"""Train the research agent: ``python -m examples.deep_research.train``.

There is one reward, for the report. It is credited to the nodes (``credit="node"``): the calls of a
node are compared with those of the same node in the other runs of the question.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import typer

from examples.deep_research.agent import State, build_agent
from examples.deep_research.environment import Scenario, World, answers, make_world, reward
from examples.support.command import train_command
from examples.support.demo import Demo, Fit, Setup
from langchain_art import ChatART, Run, capture

BASE_MODEL = Path(__file__).parent / "base_model"
POLICY = "research-agent"


def make_rollout(model: ChatART, world: World) -> Callable[[Scenario], Awaitable[Run]]:
    """The user's part: run the graph on one scenario, say what is good."""
    agent = build_agent(model)

    async def rollout(scenario: Scenario) -> Run:
        async with capture(scenario=scenario.id) as run:
            asked: State = {"question": scenario.question}
            state = await agent.ainvoke(asked, context=world.corpus)
            run.reward = reward(scenario, state["report"])
            run.scores |= figures(scenario, state)
        return run

    return rollout


def figures(scenario: Scenario, state: State) -> dict[str, float]:
    """What each node did in one run, whatever the others did; none of it is rewarded.

    - ``plan``: share of the facts asked for that there was a search of their own for.
    - ``read``: of those searches, the share that found what the record says.
    - ``write``: of the facts that were found, right or wrong, the share that the report has in
      their place.
    """
    wanted = {" ".join(pair): at for at, pair in enumerate(scenario.pairs)}
    found: dict[int, str] = {}
    for _, note in sorted(state.get("notes", []), key=lambda placed: placed[0]):
        if note["query"] in wanted:
            found.setdefault(wanted[note["query"]], note["found"].casefold())
    shares = {"plan": len(found) / len(wanted)}
    if found:
        report = answers(state["report"])
        right = [text == scenario.facts[at].casefold() for at, text in found.items()]
        placed = [report[at : at + 1] == [text] for at, text in found.items()]
        shares["read"] = sum(right) / len(found)
        shares["write"] = sum(placed) / len(found)
    return shares


def build_fit(setup: Setup) -> Fit:
    """A corpus of the setup's seed, and questions about it."""
    world, model = make_world(setup.seed), setup.chat()
    return Fit(
        trainer=setup.trainer([model], config=setup.config(credit="node")),
        rollout=make_rollout(model, world),
        train=world.scenarios("train", setup.train_scenarios),
        held_out=world.scenarios("test", setup.demo.held_out),
    )


DEMO = Demo(
    name="deep-research",
    title="Research agent",
    base_model=BASE_MODEL,
    policies=(POLICY,),
    build=build_fit,
)

main = train_command(DEMO, "Train a small model to plan searches, read and report.")

if __name__ == "__main__":
    typer.run(main)
