"""Calls of four kinds of agents, as a server records them: token ids, no model behind them.

What a model says and what its tools answer are random tokens; lengths vary by 30 %. All runs have
the same system prompt and tools, as if one agent had worked on several scenarios; replies begin
with the same four tokens, as tool calls do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run

VOCAB = 4096


@dataclass(frozen=True)
class Workload:
    """The runs of one step.

    Attributes:
        name: of the workload.
        size: runs of each scenario, one scenario's after the other's.
        runs: for each run its calls, in order.
        rewards: of the runs.
    """

    name: str
    size: int
    runs: list[list[SampledCall]]
    rewards: list[float]

    def credited_runs(self) -> list[list[SampledCall]]:
        """The runs, each call with its run's advantage: reward minus the scenario's mean."""
        means = [
            sum(self.rewards[start : start + self.size]) / self.size
            for start in range(0, len(self.runs), self.size)
        ]
        return [
            [replace(call, advantage=reward - means[i // self.size]) for call in calls]
            for i, (calls, reward) in enumerate(zip(self.runs, self.rewards, strict=True))
        ]

    def rows(self) -> list[Row]:
        """As the server lays them out."""
        return [row for calls in self.credited_runs() for row in rows_of_run(calls)]

    def call_rows(self) -> list[Row]:
        """A row for each call."""
        return [
            row for calls in self.credited_runs() for call in calls for row in rows_of_run([call])
        ]


@dataclass
class _Talk:
    """One conversation of an agent, growing; `calls` are those of the run it belongs to."""

    rng: random.Random
    shown: list[int]
    calls: list[SampledCall]
    run: str
    opening: list[int] = field(default_factory=list[int])

    def say(self, length: int) -> None:
        """A call of the model; its reply begins as all of this kind do (`opening`)."""
        reply = self.opening + words(self.rng, length)
        name, logprobs = f"{self.run}-{len(self.calls)}", [-1.0] * len(reply)
        self.calls.append(SampledCall(name, list(self.shown), reply, logprobs))
        self.shown += reply

    def hear(self, length: int) -> None:
        """An answer of a tool."""
        self.shown += words(self.rng, length)


def words(rng: random.Random, length: int) -> list[int]:
    """Random tokens, `length` give or take 30 %."""
    return [rng.randrange(VOCAB) for _ in range(round(length * rng.uniform(0.7, 1.3)))]


def _react(rng: random.Random, talk: _Talk, low: int, high: int) -> None:
    for _ in range(rng.randint(low, high) - 1):
        talk.say(28)
        talk.hear(96)
    talk.say(28)


def _build(
    name: str, groups: int, size: int, system: int, question: int, play: Callable[..., None]
) -> Workload:
    rng = random.Random(name)
    shared, opening = words(rng, system), words(rng, 4)
    runs: list[list[SampledCall]] = []
    for group in range(groups):
        asked = words(rng, question)
        for member in range(size):
            calls: list[SampledCall] = []
            play(rng, _Talk(rng, shared + asked, calls, f"{group}-{member}", opening))
            runs.append(calls)
    return Workload(name, size, runs, [rng.choice([0.0, 0.3, 0.5, 1.0]) for _ in runs])


def short_tool_agent() -> Workload:
    """Three to eight calls with tools in between."""
    return _build("short_tool_agent", 2, 8, 600, 60, lambda r, t: _react(r, t, 3, 8))


def long_agent() -> Workload:
    """Ten to sixteen calls: most of a run is its own."""
    return _build("long_agent", 2, 6, 600, 60, lambda r, t: _react(r, t, 10, 16))


def shared_prompt() -> Workload:
    """A long system prompt with a document, one to three calls."""
    return _build("shared_prompt", 2, 8, 1600, 300, lambda r, t: _react(r, t, 1, 3))


def real_runs() -> Workload:
    """For a pretrained model: a prompt of 1,500 tokens, sixteen runs of three calls."""
    return _build("real_runs", 2, 8, 1500, 60, lambda r, t: _react(r, t, 3, 3))


def multi_agent() -> Workload:
    """A planner that sees all; three workers in parallel with prompts of their own; a writer."""
    workers = [words(random.Random(i), 200) for i in range(3)]

    def play(rng: random.Random, planner: _Talk) -> None:
        for _ in range(2):
            planner.say(32)
            task = planner.shown[-32:]
            for prompt in workers:
                worker = _Talk(rng, prompt + task, planner.calls, planner.run, planner.opening)
                _react(rng, worker, 1, 3)
                planner.shown += worker.shown[-24:]
        planner.say(48)

    return _build("multi_agent", 2, 6, 400, 60, play)


def few_tokens() -> Workload:
    """One group of four short runs: to see that a script works."""
    return _build("few_tokens", 1, 4, 120, 20, lambda r, t: _react(r, t, 1, 2))


def sixteen_thousand() -> Workload:
    """For memory: a long agent with some 16 thousand distinct tokens in a step."""
    return _build("sixteen_thousand", 2, 5, 600, 60, lambda r, t: _react(r, t, 10, 16))


def six_turns(name: str, scenarios: int) -> Workload:
    """Eight runs of each scenario, of six turns of 300 tokens."""

    def play(_rng: random.Random, talk: _Talk) -> None:
        for _ in range(5):
            talk.say(296)
            talk.hear(100)
        talk.say(296)

    return _build(name, scenarios, 8, 900, 100, play)


def default_step() -> Workload:
    """A step of a fit with the defaults: four scenarios."""
    return six_turns("default_step", 4)


def large_step() -> Workload:
    """A step of 32 scenarios."""
    return six_turns("large_step", 32)


WORKLOADS = (short_tool_agent, long_agent, shared_prompt, multi_agent)
