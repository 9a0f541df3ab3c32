"""A fit's records as trackers show them: names of metrics, tables of runs and actions.

Names are those of ART (OpenPipe) where it has the quantity (``train/reward``, ``loss/grad_norm``);
the x axis is the training step.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ArtError
from langchain_art.evaluators.transcript import compact, text_of, tool_calls
from langchain_art.trackers import tracker_thread
from langchain_art.trackers.tracker_thread import AdapterFiles, FitCard, TableRow, TrackedRecord
from langchain_art.training.fit_state import HISTORY, History, Line, read_records
from langchain_art.training.identity import flat
from langchain_art.training.progress import Display
from langchain_art.training.records import EvalResult, FitResult, Rollback, StepRecord, tokens
from langchain_art.wire import Trajectory, TrajectoryGroup
from langchain_art.wire.redaction import redact

#: Rows of a step's tables, and characters of a cell.
MOST_RUNS, MOST_ACTIONS, MOST_TEXT = 16, 64, 2000
#: The learner's metrics that are of the batch and not of the loss; and other names for two.
_OF_BATCH = {
    *("runs_trained", "calls_trained", "tokens_trained", "tokens_processed", "tokens_sampled"),
    *("staleness_mean", "staleness_max", "truncated_share"),
}
#: Seconds that the fit sent the server, and gives the trackers itself: ``time/…``.
_OF_FIT = frozenset({"rollout_seconds", "judge_seconds"})
_RENAMED = {"loss/loss": "loss/train", "loss/swap_seconds": "time/swap_s"}
#: Seconds that the end of a fit waits for its trackers.
PATIENCE = 60.0


class FitTracking:
    """Feeds the trackers of one fit from its loop."""

    def __init__(
        self, trackers: Sequence[tracker_thread.Tracker], history: History, display: Display
    ) -> None:
        path = history.directory / HISTORY
        known = list(read_records(path)) if trackers and path.exists() else []
        self._display, self._next = display, len(known)
        identity, directory = history.state.used, history.directory
        given = {
            "policies": " and ".join(identity.policies),
            "seed": identity.seed,
            "scenarios": identity.scenarios,
            **flat(identity.config, "config"),
            **flat(identity.settings, "settings"),
        }
        card = FitCard(
            fit_id=history.state.fit_id,
            name=directory.name,
            folder=directory,
            config={name: _plain(value) for name, value in given.items()},
        )
        former = [tracked(one, number) for number, one in enumerate(known)]
        self._trackers = [
            tracker_thread.TrackerThread(one, card, former, display.line) for one in trackers
        ]
        self._files: Path | None = None

    def record(self, record: Line, groups: Sequence[TrajectoryGroup] = ()) -> None:
        """Show a record that is on disk, and the runs of its step."""
        if self._trackers:
            self._put(tracked(record, self._next, groups))
            self._next += 1

    async def adapters(self, client: AsyncArtClient, result: FitResult) -> None:
        """Store the adapters of the best evaluated versions and of the last ones."""
        if not self._trackers:
            return
        best = result.best.versions if result.best else ()
        self._files = Path(tempfile.mkdtemp(prefix="langchain-art-"))
        for name in dict.fromkeys([*best, *result.adapters]):  # the last one is W&B's "latest"
            policy, _, version = name.partition("@")
            if not int(version):
                continue  # the base, as it was
            aliases = ["best"] * (name in best) + ["last"] * (name in result.adapters)
            folder = self._files / name
            try:
                await client.download_adapter(policy, int(version), folder)
            except ArtError as error:
                self._display.warn(f"{name} cannot be sent to the trackers: {error}")
                continue
            about: dict[str, Any] = {"policy": policy, "version": int(version)}
            if "best" in aliases and result.best is not None:
                about["val/reward"] = result.best.mean
            labels = (*aliases, f"v{version}")
            self._put(AdapterFiles(policy, folder, labels, about))

    def finish(self) -> None:
        """End the trackers' runs, and say of each where it is or what it lacks."""
        self._put(None)
        until = time.monotonic() + PATIENCE
        for tracker in self._trackers:
            self._display.line(tracker.outcome(until - time.monotonic()))
        if self._files is not None:
            shutil.rmtree(self._files, ignore_errors=True)

    def _put(self, what: TrackedRecord | AdapterFiles | None) -> None:
        for tracker in self._trackers:
            tracker.put(what)


def tracked(record: Line, number: int, groups: Sequence[TrajectoryGroup] = ()) -> TrackedRecord:
    """A line of the history as trackers get it."""
    if isinstance(record, EvalResult):
        return TrackedRecord(number, record.step or 0, eval_metrics(record))
    if isinstance(record, Rollback):
        found = {"train/rolled_back_to": float(record.to_step)}
        return TrackedRecord(number, record.step, found)
    runs = [run for group in groups for run in group.trajectories]
    shown = _shown(groups)
    tables = {"runs": run_rows(shown), "actions": action_rows(shown)}
    return TrackedRecord(
        number,
        record.step,
        step_metrics(record) | run_metrics(runs),
        {name: rows for name, rows in tables.items() if rows},
    )


def eval_metrics(record: EvalResult) -> dict[str, float]:
    """``val/…`` of an evaluation on held-out scenarios."""
    found = {
        "val/reward": record.mean,
        "val/reward_ci95": record.ci95,
        "val/runs": record.n,
        "val/failed": record.failed,
        "val/unscored": record.unscored,
        "time/eval_s": record.seconds,
        "costs/judge_usd": record.judge_cost,
        **{f"val/nodes/{node}/reward": reward for node, reward in record.node_rewards.items()},
    }
    return _known(found)


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Metrics of a step by their conventional names; those that are not known are left out.

    The learner's own metrics are ``loss/<name>`` (``loss/<policy>/<name>`` of several policies).
    """
    found: dict[str, float | None] = {
        "train/reward": record.reward_mean,
        "train/reward_std": record.reward_std,
        **{f"nodes/{node}/reward": worth for node, worth in record.rewards_by_node.items()},
        "data/groups": record.groups,
        "data/groups_resampled": record.resampled,
        "data/runs_failed": record.failed,
        "data/runs_retried": record.retried,
        "data/scenarios_drawn": record.drawn,
        **{f"data/tokens_{name}": count for name, count in record.tokens.items()},
        **{f"time/{name}_s": seconds for name, seconds in record.seconds.items()},
        "costs/judge_usd": record.judge_cost,
        **{f"excluded/{reason}": count for reason, count in record.excluded.items()},
    }
    alike = [one.excluded.get("groups.zero_variance", 0) for one in record.results.values()]
    if record.groups:
        found["train/frac_groups_zero_std"] = statistics.fmean(alike) / record.groups
    for phase, kind, name in (("rollout", "completion", "actor"), ("train", "trained", "trainer")):
        if (seconds := record.seconds.get(phase, 0.0)) > 0 and kind in record.tokens:
            found[f"throughput/{name}_tok_s"] = record.tokens[kind] / seconds
    for name, value in record.metrics.items():
        if name.rpartition("/")[2] in _OF_FIT:
            continue
        section = "data" if name.rpartition("/")[2] in _OF_BATCH else "loss"
        full = f"{section}/{name}"
        found[_RENAMED.get(full, full)] = value
    for node, report in record.nodes.items():
        found[f"nodes/{node}/tokens_trained"] = report.tokens
        found[f"nodes/{node}/advantage_abs"] = report.advantage_abs
    return _known(found)


def run_metrics(runs: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of a step's runs: their criteria's means, turns and tokens a run, how they ended."""
    if not runs:
        return {}
    scores = defaultdict[str, list[float]](list)
    for run in runs:
        for name, value in run.scores.items():
            scores[name].append(value)
    return {
        **{f"train/score_{name}": statistics.fmean(given) for name, given in scores.items()},
        "train/exception_rate": sum(run.status == "failed" for run in runs) / len(runs),
        "train/truncated_frac": sum(run.status == "truncated" for run in runs) / len(runs),
        "train/turns_mean": statistics.fmean(len(run.turns) for run in runs),
        "train/completion_tokens_mean": tokens(runs)["completion"] / len(runs),
        "data/runs": float(len(runs)),
    }


def _known(found: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if value is not None}


def _shown(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    """The first run of each group, then the second of each, to the cap."""
    rounds = zip_longest(*(group.trajectories for group in groups))
    return [run for run in chain.from_iterable(rounds) if run is not None][:MOST_RUNS]


def run_rows(runs: Iterable[Trajectory]) -> list[TableRow]:
    """One row a run."""
    rows: list[TableRow] = []
    for run in runs:
        spoken = tokens([run])
        replies = [turn.reply for turn in run.turns if turn.excluded_because is None]
        rows.append(
            {
                "run": run.id,
                "scenario": run.scenario,
                "status": run.status,
                "reward": run.total_return,
                "scores": compact(run.scores) if run.scores else None,
                "calls": len(run.turns),
                "prompt_tokens": spoken["prompt"],
                "completion_tokens": spoken["completion"],
                "input": _cell(run.input),
                "output": _cell(run.output),
                "last_reply": _cell(
                    text_of((replies[-1] or {}).get("content")) if replies else None
                ),
                "error": _cell(run.error),
            }
        )
    return rows


def action_rows(runs: Iterable[Trajectory]) -> list[TableRow]:
    """One row a model call of the first runs: the tool that it called, or what it said."""
    rows: list[TableRow] = []
    for run in runs:
        for index, turn in enumerate(run.turns):
            called = tool_calls(turn.reply)
            said = text_of((turn.reply or {}).get("content"))
            rows.append(
                {
                    "run": run.id,
                    "call": index,
                    "node": turn.label,
                    "model": turn.model,
                    "tools": ", ".join(name for name, _ in called) or None,
                    "arguments": _cell([arguments for _, arguments in called] or None),
                    "reply": _cell(said or None),
                    "reward": turn.reward,
                    "seconds": turn.latency,
                    "excluded": turn.excluded_because,
                    "error": _cell(turn.error),
                }
            )
    return rows[:MOST_ACTIONS]


def _cell(value: Any) -> str | None:
    """A text without secrets, cut; the number of the characters that are left out is said."""
    if value is None:
        return None
    text = redact(value if isinstance(value, str) else compact(value))
    more = len(text) - MOST_TEXT
    return text if more <= 0 else f"{text[:MOST_TEXT]}… ({more:,} more characters)"


def _plain(value: Any) -> str | float | int | bool | None:
    plain = value is None or isinstance(value, str | float | int | bool)
    return value if plain else json.dumps(value, default=str)
