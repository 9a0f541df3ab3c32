"""Environments of OpenEnv, on a server: reset, steps with actions, and their rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import httpx

from langchain_art.environments.parts import Conversation, Environment, Scenario, divided, installed
from langchain_art.errors import ConfigError
from langchain_art.rollout.graph_rollout import Graph
from langchain_art.tracing.run import Run
from langchain_art.tracing.scope import capture


def from_openenv(
    base_url: str, graph: Graph, *, resets: Sequence[Mapping[str, Any]], held_out: int
) -> Environment:
    """An environment behind an OpenEnv server; each scenario is another reset.

    The graph is told each observation: its text if a text is all that it has, or else its JSON. Its
    last message is the action: a JSON object, or the value of the only field that an action must
    have. The reward is the sum of the steps'. An action that the server refuses by its schema ends
    the run, which keeps the rewards before it and has the score ``refused_action`` 1.

    Example::

        resets = [{"seed": seed} for seed in range(300)]
        env = from_openenv("http://127.0.0.1:8000", graph, resets=resets, held_out=50)
        await trainer.fit(env.rollout, env.train, steps=50, eval_scenarios=env.held_out)

    Args:
        base_url: of the server. It has to admit as many sessions as there are runs at once
            (``max_concurrent_envs`` there, ``Trainer(concurrency=)`` here).
        graph: a compiled graph, whose state has ``messages``.
        resets: arguments of ``reset``, one mapping a scenario.
        held_out: how many of them are held out.

    Raises:
        ConfigError: OpenEnv is not installed, the server gives no schema, two resets are alike, or
            `held_out` leaves none to train on.
    """
    with installed("openenv"):
        openenv: Any = import_module("openenv")
    field = _only_field(base_url)

    async def rollout(scenario: Scenario) -> Run:
        async with (
            capture(scenario=scenario["id"]) as run,
            openenv.GenericEnvClient(base_url=base_url) as client,
        ):
            talk, result = Conversation(graph, run), await client.reset(**scenario["reset"])
            run.reward, run.scores["refused_action"] = 0.0, 0.0
            while not result.done:
                action = _action(await talk.answer(_told(result.observation)), field)
                try:
                    result = await client.step(action)
                except RuntimeError as error:  # it is all that the client raises
                    if "(code: VALIDATION_ERROR)" not in str(error):
                        raise
                    run.scores["refused_action"] = 1.0
                    break
                run.reward += float(result.reward or 0.0)
        return run

    scenarios = [{"id": json.dumps(one, sort_keys=True), "reset": dict(one)} for one in resets]
    return divided(rollout, scenarios, held_out)


def _only_field(base_url: str) -> str | None:
    """The only field that an action of the server must have; None: there are several, or none."""
    try:
        answer = httpx.get(f"{base_url.rstrip('/')}/schema").raise_for_status()
    except httpx.HTTPError as error:
        raise ConfigError(f"got no schema of actions from {base_url!r}: {error}") from error
    required: list[str] = answer.json()["action"].get("required", [])
    return required[0] if len(required) == 1 else None


def _told(observation: Mapping[str, Any]) -> str:
    fields = {k: v for k, v in observation.items() if k not in ("done", "reward", "metadata")}
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(fields, ensure_ascii=False)


def _action(text: str, field: str | None) -> dict[str, Any]:
    """The action that a text says; one that no server admits if the text is none."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text.strip()
    return value if isinstance(value, dict) else {field or "": value}
