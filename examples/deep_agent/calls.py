"""What each kind of call learned: from the steps' records, the runs and their audits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from langchain_art import ArtClient
from langchain_art.credit.credit_assignment import pool_advantages
from langchain_art.training.records import StepRecord
from langchain_art.wire import Trajectory, Turn

MODES = ("files_with_matches", "content", "count")


@dataclass
class Kind:
    """One kind of call.

    Attributes:
        agent: The node that calls, with the nodes around it.
        action: The tool that the reply calls, with the argument that matters; or what it answers.
        calls: Calls that were trained.
        tokens: Their trained tokens.
        advantage: Mean over these tokens.
        shares: Of the agent's calls in the first third of the steps, and in the last.
    """

    agent: str
    action: str
    calls: int = 0
    tokens: int = 0
    advantage: float = 0.0
    shares: list[float] = field(default_factory=list[float])


def action(turn: Turn) -> str:
    """The tool that a reply calls, with the argument that matters, or what kind of answer it is."""
    reply, told = turn.reply or {}, str(turn.messages[-1]["content"])
    calls, text = reply.get("tool_calls"), str(reply.get("content")).strip()
    if text.startswith("<answer>"):
        name = f"<answer> {' '.join(told.split()[1:2])}</answer>"
        return "answer: the name that was found" if text == name else "answer: another word"
    if not calls:
        return "report: a line that was found" if text and text in told else "other text"
    name, arguments = calls[0]["function"]["name"], json.loads(calls[0]["function"]["arguments"])
    if name == "grep" and (mode := arguments.get("output_mode", "files_with_matches")) in MODES:
        return f"grep: {mode}"
    if name == "task":
        words = str(arguments.get("description")).split()
        return f"task: {'all of the question' if len(words) > 2 else 'one word of it'}"
    return name if name == "read_file" else "a call that is refused"


def learned(steps: Iterable[StepRecord], client: ArtClient) -> list[Kind]:
    """The kinds of calls of a fit with ``credit="run"`` and standardized advantages.

    Args:
        steps: The fit's ``history``.
        client: Of the server that has its runs.
    """
    found: dict[tuple[str, str], Kind] = {}
    history = list(steps)
    third = -(-len(history) // 3)
    counts = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()  # in the first, in the last
    for number, step in enumerate(history):
        parts = counts[number >= third : 1 + (number >= len(history) - third)]
        for group in step.run_ids:
            runs = [client.trajectory(run) for run in group]
            for run, advantage in zip(runs, _advantages(runs), strict=True):
                audit = client.audit(run)
                for turn, audited in zip(run.turns, audit.turns, strict=True):
                    key = turn.label, action(turn)
                    kind = found.setdefault(key, Kind(*key))
                    for part in parts:
                        part.update([key, key[:1]])
                    if advantage is not None and audited.trained_tokens:
                        kind.calls += 1
                        kind.tokens += audited.trained_tokens
                        kind.advantage += advantage * audited.trained_tokens
    for (agent, does), kind in found.items():
        kind.advantage /= kind.tokens or 1
        kind.shares = [part[agent, does] / (part[agent,] or 1) for part in counts]
    return sorted(found.values(), key=lambda one: (one.agent, -one.calls))


def _advantages(runs: list[Trajectory]) -> list[float | None]:
    """Advantage of each run of a group; None of those that teach nothing."""
    rewards = [[reward] for run in runs if (reward := run.total_return) is not None]
    found = iter(pool_advantages(rewards, "standardized") or ())
    return [None if run.total_return is None else next(found, [None])[0] for run in runs]
