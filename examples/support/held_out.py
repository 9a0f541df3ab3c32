"""The held-out runs of a fit, as the server has stored them: figures and transcripts."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_art import ArtClient, EvalResult, Run
from langchain_art.wire import Message, Trajectory
from langchain_art.wire.trajectories import EVALUATION

#: Runs of one scenario to look through for those of an evaluation.
_RUNS_OF_A_SCENARIO = 200

Runs = Mapping[str, Trajectory]
Figure = dict[str, Any]


def stored_runs(
    client: ArtClient, scenarios: Sequence[Any], evaluations: Sequence[EvalResult | None]
) -> list[Runs]:
    """For each evaluation, its newest run of each scenario, by the scenario's id.

    Args:
        client: Of the server that the evaluations were made with.
        scenarios: The held-out ones.
        evaluations: Those that are wanted.
    """
    found: list[dict[str, Trajectory]] = [{} for _ in evaluations]
    for scenario in scenarios:
        stored = client.trajectories(_RUNS_OF_A_SCENARIO, scenario.id)
        for evaluation, runs in zip(evaluations, found, strict=True):
            version = evaluation and evaluation.version
            for run in stored:  # newest first
                if run.metadata.get(EVALUATION) == version:
                    runs.setdefault(scenario.id, run)
    return list(found)


def measures(before: Runs, after: Runs) -> dict[str, dict[str, Figure | None]]:
    """By name of a score of the runs: its figure ``before`` and ``after``."""
    parts = {"before": score_figures(before.values()), "after": score_figures(after.values())}
    names = dict.fromkeys(name for figures in parts.values() for name in figures)
    return {name: {when: part.get(name) for when, part in parts.items()} for name in names}


def score_figures(runs: Iterable[Run | Trajectory]) -> dict[str, Figure]:
    """By name of a score: its mean over the runs that have it, and the interval."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name, value in run.scores.items():
            values[name].append(value)
    return {name: figure(found) for name, found in values.items()}


def figure(values: Sequence[float]) -> Figure:
    """Mean, the half-width of its 95 % interval (1.96 · s/√n; None of one value), and n."""
    spread = 1.96 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "ci95": spread, "n": len(values)}


def shown(found: Figure | None) -> str:
    """A figure as text: ``0.520 ± 0.069``."""
    if found is None:
        return "none"
    spread = "" if found["ci95"] is None else f" ± {found['ci95']:.3f}"
    return f"{found['mean']:.3f}{spread}"


def write_transcripts(path: Path, title: str, before: Runs, after: Runs) -> Path:
    """Write one held-out scenario's run before and after training, as Markdown.

    It is the first scenario whose reward rose, or the first of all if none did.
    """
    both = [name for name in before if name in after]
    risen = [name for name in both if worth(after[name]) > worth(before[name])]
    lines = [f"# {title}: a held-out scenario before and after"]
    for name in (risen or both)[:1]:
        why = "the first whose reward rose" if risen else "the first; no reward rose"
        lines.append(f"Scenario `{name}`, {why} ({len(risen)} of {len(both)} rose).")
        for heading, run in (("Before", before[name]), ("After", after[name])):
            model = next((turn.model for turn in run.turns if turn.model), "no call")
            lines += [f"## {heading}: {model}, reward {run.total_return}", *_told(run)]
    path.write_text("\n\n".join(lines) + "\n")
    return path


def worth(run: Trajectory) -> float:
    """The run's return; that of a run without a reward is below all others."""
    found = run.total_return
    return float("-inf") if found is None else found


def _told(run: Trajectory) -> list[str]:
    told: list[str] = []
    for turn in run.turns:
        node = "/".join(turn.path) or turn.node or "model"
        for message in turn.messages:
            told += _quoted(f"{message.get('role')}", message)
        if turn.reply is not None:
            told += _quoted(f"**{node}**", turn.reply)
        if turn.error:
            told.append(f"*error*: {turn.error}")
    return told


def _quoted(who: str, message: Message) -> list[str]:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    texts = [_text(message.get("content"))]
    texts += [f"{call['name']}({_text(call['arguments'])})" for call in calls]
    text = "\n".join(text for text in texts if text) or "(empty)"
    return [f"{who}:", "\n".join(f"    {line}" for line in text.splitlines())]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content) if content else ""
