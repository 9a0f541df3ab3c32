"""Steps per hour when rollouts go on while the server trains, over steps that wait for each other.

The demo's e-mail agent, with tools that answer after a heavy-tailed time (log-normal, median 0.1 s,
sigma 1.7, at most 6 s: one tool call in a hundred takes 5 s). A synchronous step waits for the
slowest of its 64 runs, and then the runs wait for the step. With ``Trainer(max_steps_ahead=2)``
rollouts run up to two steps ahead, a step takes the groups that end first, and the learner
corrects for the versions that the calls came from.

Five seeds, each way from the same base model on the same questions; then both are evaluated on the
same held-out questions. `final_reward_difference` is asynchronous less synchronous, with the half
width of the 95 % interval over the seeds beside it.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ToolCallRequest
from rich.console import Console

from benchmarks.learning.seeds import ci95_of_five
from examples.email_search.agent import MAX_MODEL_CALLS, SYSTEM_PROMPT, TOOLS, CallCap, reward
from examples.email_search.inbox import Inbox, MailStore, Scenario, build
from examples.email_search.train import BASE_MODEL, MAX_TOKENS, POLICY
from langchain_art import (
    ChatART,
    FitResult,
    LocalServer,
    LRSchedule,
    Run,
    TrainConfig,
    Trainer,
    capture,
)

SEEDS, STEPS, GROUPS, SIZE, HELD_OUT = 5, 12, 8, 8, 100
AHEAD = 2
MEDIAN, SIGMA, LONGEST = 0.1, 1.7, 6.0
console = Console()


class SlowTools(AgentMiddleware[Any, Any]):
    """Tools that take as long as tools do: mostly a moment, now and then very long."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        seconds = MEDIAN * self._random.lognormvariate(0.0, SIGMA)
        await asyncio.sleep(min(seconds, LONGEST))
        return await handler(request)


async def fit(base_url: str, folder: Path, seed: int, ahead: int) -> tuple[FitResult, float]:
    """A fit, and its seconds from the first rollout to the last version, without evaluations."""
    mails = MailStore(
        build(folder / "mails.sqlite3", n_train=STEPS * GROUPS, n_test=HELD_OUT, seed=seed)
    )
    policy = f"{POLICY}-{seed}-{ahead}"
    model = ChatART(model=policy, base_url=base_url, max_tokens=MAX_TOKENS)

    def rollout_with(middleware: list[Any]) -> Callable[[Scenario], Awaitable[Run]]:
        agent = create_agent(
            model,
            TOOLS,
            system_prompt=SYSTEM_PROMPT,
            context_schema=Inbox,
            middleware=[CallCap(MAX_MODEL_CALLS), *middleware],
        )

        async def rollout(scenario: Scenario) -> Run:
            async with capture(scenario=scenario.id) as run:
                question: Any = {"messages": [("user", scenario.question)]}
                state = await agent.ainvoke(question, context=mails.inbox(scenario.inbox))
                run.reward = reward(scenario, state)
            return run

        return rollout

    trainer = Trainer(
        model,
        group_size=SIZE,
        groups_per_step=GROUPS,
        concurrency=4 * GROUPS * SIZE,
        max_steps_ahead=ahead,
        config=TrainConfig(
            learning_rate=3e-3,
            schedule=LRSchedule(warmup_steps=3, decay_steps=STEPS),
            advantage="standardized",
            tokens_per_microbatch=4096,
        ),
        out_dir=folder / "fit",
        seed=seed,
        console=Console(file=io.StringIO()),
    )
    begun = time.monotonic()
    result = await trainer.fit(
        rollout_with([SlowTools(seed)]), mails.scenarios("train"), steps=STEPS
    )
    seconds = time.monotonic() - begun
    after = await trainer.evaluate(rollout_with([]), mails.scenarios("test"))
    mails.close()
    assert after.mean is not None
    assert result.version == STEPS, "a step trained nothing"
    console.print(f"seed {seed}, ahead {ahead}: {STEPS} steps in {seconds:.0f} s, then {after}")
    return result.model_copy(update={"after": after}), seconds


def run() -> tuple[dict[str, float], dict[str, object]]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seconds: dict[int, list[float]] = {0: [], AHEAD: []}
    rewards: dict[int, list[float]] = {0: [], AHEAD: []}
    stale: list[float] = []
    with tempfile.TemporaryDirectory(prefix="art-bench-") as temporary:
        root = Path(temporary)
        with LocalServer(BASE_MODEL, policies=[POLICY], data_dir=root / "server") as server:
            for seed in range(SEEDS):
                for ahead in seconds:
                    folder = root / f"{seed}-{ahead}"
                    folder.mkdir()
                    result, took = asyncio.run(fit(server.base_url, folder, seed, ahead))
                    seconds[ahead].append(took)
                    assert result.after is not None
                    assert result.after.mean is not None
                    rewards[ahead].append(result.after.mean)
                    if ahead:
                        stale += [step.metrics["staleness_mean"] for step in result.history]
    differences = [b - a for a, b in zip(rewards[0], rewards[AHEAD], strict=True)]
    figures = {
        "async_over_sync": statistics.median(
            a / b for a, b in zip(seconds[0], seconds[AHEAD], strict=True)
        ),
        "steps_per_hour_sync": 3600 * STEPS / statistics.median(seconds[0]),
        "steps_per_hour_async": 3600 * STEPS / statistics.median(seconds[AHEAD]),
        "final_reward_sync": statistics.fmean(rewards[0]),
        "final_reward_async": statistics.fmean(rewards[AHEAD]),
        "final_reward_difference": statistics.fmean(differences),
        "final_reward_difference_ci95": ci95_of_five(differences),
        "staleness_mean": statistics.fmean(stale),
    }
    more: dict[str, object] = {
        "seconds": seconds,
        "rewards": rewards,
        "latency": {"median": MEDIAN, "sigma": SIGMA, "longest": LONGEST},
        "steps": STEPS,
        "groups_per_step": GROUPS,
        "group_size": SIZE,
    }
    return figures, more
