"""Tasks of verifiers (its v1): setup, the graph's answer, and the task's own rewards of it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from langchain_core.messages import convert_to_messages, convert_to_openai_messages

from langchain_art.environments.parts import Conversation, Environment, Scenario, divided, installed
from langchain_art.errors import ArtError, ConfigError
from langchain_art.rollout.graph_rollout import Graph
from langchain_art.tracing.run import Run
from langchain_art.tracing.scope import capture


def from_verifiers(taskset: Any, graph: Graph, *, held_out: int) -> Environment:
    """The tasks of a taskset, each answered by the graph on this machine, as verifiers' harness.

    A task's ``setup``, ``finalize``, rewards, metrics and judges run as in verifiers; the reward is
    its weighted sum, the parts are ``run.scores``. Tools are the graph's own.

    Example::

        env = from_verifiers(MyTaskset(vf.TasksetConfig()), graph, held_out=50)
        await trainer.fit(env.rollout, env.train, steps=50, eval_scenarios=env.held_out)

    Args:
        taskset: a finite ``verifiers.v1.Taskset``; ``taskset.take(n)`` bounds one.
        graph: a compiled graph, whose state has ``messages``.
        held_out: how many of its tasks are held out.

    Raises:
        ConfigError: verifiers is not installed, the taskset has no end, `held_out` leaves no task,
            or a task stops or changes model calls, which do not pass through verifiers here.
    """
    with installed("verifiers"):
        vf: Any = import_module("verifiers.v1")
        chat: Any = import_module("verifiers.v1.dialects.chat")
        hooks: Any = import_module("verifiers.v1.utils.decorators")
    if not taskset.bounded:
        raise ConfigError("got a taskset without an end, expected a finite one; use .take(n)")
    tasks = {task.key: task for task in taskset}
    for task in tasks.values():
        if task.hooks("stop") or hooks.discover_decorated(task, "intercept"):
            raise ConfigError(
                f"got the task {type(task).__name__} with @stop or @intercept, expected one "
                "without: the graph's model calls do not pass through verifiers"
            )

    class GraphHarness(vf.Harness):
        NEEDS_CONTAINER = EXECUTES_CODE = False
        APPENDS_SYSTEM_PROMPT = True

        def __init__(self, config: Any, run: Run) -> None:
            super().__init__(config)
            self.talk = Conversation(graph, run)

        async def launch(self, ctx: Any, trace: Any, *rest: Any) -> Any:
            system, prompt = self.resolve_prompt(rest[-1])
            given = [vf.SystemMessage(content=system)] if system else []
            given += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
            asked = convert_to_messages([chat.message_to_wire(one) for one in given])
            await self.talk.answer(*asked)
            for n, message in enumerate(convert_to_openai_messages(self.talk.messages)):
                parsed = chat.parse_message(message)
                sampled = n >= len(asked) and parsed.role == "assistant"
                node = vf.MessageNode(parent=n - 1 if n else None, message=parsed, sampled=sampled)
                trace.nodes.append(node)
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    settings = {"model": "graph", "runtime": vf.SubprocessConfig(), "harness": {"id": "null"}}

    async def rollout(scenario: Scenario) -> Run:
        async with capture(scenario=scenario["id"]) as run:
            agent = vf.Agent(vf.AgentConfig(**settings))
            agent.harness = harness = GraphHarness(agent.config.harness, run)
            trace = await agent.run(tasks[scenario["id"]])
            if not trace.ok:
                raise harness.talk.failure or ArtError(f"verifiers: {trace.last_error.message}")
            rewards = {key: one.score for key, one in trace.rewards.items() if one is not None}
            metrics = {key: one for key, one in trace.metrics.items() if one is not None}
            run.reward, run.scores = trace.reward, rewards | metrics
        return run

    scenarios = [{"id": key, "prompt": task.data.prompt_text} for key, task in tasks.items()]
    return divided(rollout, scenarios, held_out)
