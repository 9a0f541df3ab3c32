"""Trials of Harbor as rollouts: of a graph here, and of Harbor's own agents on our server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from langchain_art.client.sync_client import ArtClient
from langchain_art.environments.parts import Conversation, Environment, Scenario, divided, installed
from langchain_art.errors import ArtError
from langchain_art.rollout.graph_rollout import Graph
from langchain_art.tracing.run import Run
from langchain_art.tracing.scope import capture
from langchain_art.wire import TrajectoryGroup

#: The conversation that the trial's `GraphAgent` leads.
conversation: ContextVar[Conversation] = ContextVar("langchain_art_harbor")


def from_harbor(
    tasks: Sequence[Any], graph: Graph, *, held_out: int, trial: Mapping[str, Any] | None = None
) -> Environment:
    """Harbor's tasks, worked on by a graph in this process; the verifier's reward is the run's.

    The graph is told the task's instruction. Its tools and nodes act in the task's environment,
    which is ``config["configurable"]["environment"]``: ``await environment.exec("ls")``.

    Example::

        tasks = await harbor.DatasetConfig(path="tasks").get_task_configs()
        env = from_harbor(tasks, graph, held_out=20, trial={"environment": {"type": "docker"}})
        await trainer.fit(env.rollout, env.train, steps=50, eval_scenarios=env.held_out)

    Args:
        tasks: of a dataset, as Harbor's ``DatasetConfig.get_task_configs`` gives them.
        graph: a compiled graph, whose state has ``messages``.
        held_out: how many tasks are held out.
        trial: other fields of Harbor's ``TrialConfig``: ``environment``, ``trials_dir``, timeouts.

    Raises:
        ConfigError: Harbor is not installed (it needs Python 3.12), or `held_out` leaves no task.
    """
    with installed("harbor"):
        import_module("harbor")
    agent = {"import_path": "langchain_art.harbor.graph_agent:GraphAgent"}

    async def rollout(scenario: Scenario) -> Run:
        async with capture(scenario=scenario["id"]) as run:
            talk = Conversation(graph, run)
            conversation.set(talk)
            run.scores = await _rewards(scenario, agent, trial, talk)
            run.reward = run.scores["reward"]
        return run

    return divided(rollout, [_scenario(task) for task in tasks], held_out)


def from_harbor_agent(
    tasks: Sequence[Any],
    agent: Mapping[str, Any],
    client: ArtClient,
    *,
    held_out: int,
    trial: Mapping[str, Any] | None = None,
) -> Environment:
    """Harbor's tasks, worked on by an agent of Harbor's whose model is a policy of our server.

    The agent gets the server's address and a key that names its run, so its calls are the run's,
    wherever it runs. Its reward comes with `verifier_reward`.

    Example::

        agent = {"name": "langgraph", "model_name": "openai/coder", "kwargs": {"project_path": "."}}
        env = from_harbor_agent(tasks, agent, client, held_out=20)
        trainer = Trainer("coder", client=client, evaluator=verifier_reward)
        await trainer.fit(env.rollout, env.train, steps=50, eval_scenarios=env.held_out)

    Args:
        tasks: as for `from_harbor`.
        agent: fields of Harbor's ``AgentConfig``. ``base_url``: the server as the agent's container
            sees it, if not as `client` does. ``model_api_key_name``: the variable of the key.
        client: of the server.
        held_out: how many tasks are held out.
        trial: as for `from_harbor`.

    Raises:
        ConfigError: as `from_harbor`.
    """
    with installed("harbor"):
        import_module("harbor")
    rollout: Any = _RemoteTrial(agent, client, trial)
    return divided(rollout, [_scenario(task) for task in tasks], held_out)


def verifier_reward(group: TrajectoryGroup) -> list[float | None]:
    """The verifiers' rewards of runs of `from_harbor_agent`: an evaluator for `Trainer`."""
    return [None if one.output is None else one.output["reward"] for one in group.trajectories]


class _RemoteTrial:
    """A rollout whose calls reach the server from elsewhere, as those of a `RemoteGraph`."""

    assistant_id = "harbor"  # by which a `RemoteGraph` is known

    def __init__(
        self, agent: Mapping[str, Any], client: ArtClient, trial: Mapping[str, Any] | None
    ) -> None:
        self._agent, self._client, self._trial = agent, client, trial

    async def ainvoke(self, scenario: Scenario, config: dict[str, Any]) -> dict[str, float]:
        run, agent = config["metadata"]["art_trajectory_id"], self._agent
        key = agent.get("model_api_key_name", "OPENAI_API_KEY")
        variables = {**agent.get("env", {}), key: self._client.run_key(run, seconds=86_400)}
        given = {"base_url": self._client.base_url, **agent, "env": variables}
        return await _rewards(scenario, given, self._trial)


def _scenario(task: Any) -> Scenario:
    name = task.get_task_id().get_name()
    return {"id": name, "task": task.model_dump(mode="json", exclude_none=True)}


async def _rewards(
    scenario: Scenario,
    agent: Mapping[str, Any],
    trial: Mapping[str, Any] | None,
    talk: Conversation | None = None,
) -> dict[str, float]:
    harbor: Any = import_module("harbor")
    config = harbor.TrialConfig(task=scenario["task"], agent=agent, **(trial or {}))
    result = await (await harbor.Trial.create(config)).run()
    if talk is not None and talk.failure is not None:
        raise talk.failure
    if not result.reward_valid:
        errors = [
            f"{e.exception_type}: {e.exception_message}" for e in result.recorded_exceptions()
        ]
        raise ArtError(f"Harbor's trial {result.trial_name} gave no reward: {errors or 'no error'}")
    rewards: dict[str, float] = result.verifier_result.rewards
    if "reward" not in rewards:
        raise ArtError(
            f"got the rewards {rewards!r:.200} of a verifier, expected one called reward"
        )
    return {name: float(value) for name, value in rewards.items()}
