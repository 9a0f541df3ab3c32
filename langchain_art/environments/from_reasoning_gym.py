"""Tasks of reasoning-gym: a question, an answer, and the dataset's own score of it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from langchain_art.environments.parts import Conversation, Environment, Scenario, divided, installed
from langchain_art.errors import ConfigError
from langchain_art.rollout.graph_rollout import Graph
from langchain_art.tracing.run import Run
from langchain_art.tracing.scope import capture


def from_reasoning_gym(dataset: Any, graph: Graph, *, held_out: int) -> Environment:
    """The tasks of a dataset of reasoning-gym; no question is in both parts.

    The answer is what stands in ``<answer>`` tags of the graph's last message, as reasoning-gym's
    own prompts ask for it; without tags, all of its text.

    Example::

        sums = reasoning_gym.create_dataset("chain_sum", seed=0, size=500)
        env = from_reasoning_gym(sums, graph, held_out=100)
        await trainer.fit(env.rollout, env.train, steps=50, eval_scenarios=env.held_out)

    Args:
        dataset: of ``reasoning_gym.create_dataset``, with a seed.
        graph: a compiled graph, whose state has ``messages``.
        held_out: how many of its questions are held out.

    Raises:
        ConfigError: reasoning-gym is not installed, the dataset has no seed, or not enough tasks.
    """
    with installed("reasoning-gym"):
        extract_answer = import_module("reasoning_gym.utils").extract_answer
    if getattr(dataset.config, "seed", None) is None:
        raise ConfigError(
            "got a dataset without a seed, expected create_dataset(…, seed=0): a fit that is "
            "resumed, and each worker, would have other tasks"
        )
    entries: dict[str, Any] = {}
    for index in range(len(dataset)):
        entry = dataset[index]
        entries.setdefault(entry["question"], (index, entry))
    name = type(dataset).__name__

    async def rollout(scenario: Scenario) -> Run:
        async with capture(scenario=scenario["id"]) as run:
            said = await Conversation(graph, run).answer(scenario["question"])
            answer = extract_answer(said) or said.strip()
            run.reward = float(dataset.score_answer(answer, entries[scenario["question"]][1]))
        return run

    scenarios = [
        {"id": f"{name}-{index}", "question": question, "answer": entry["answer"]}
        for question, (index, entry) in entries.items()
    ]
    return divided(rollout, scenarios, held_out)
