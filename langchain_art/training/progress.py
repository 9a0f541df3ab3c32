"""Progress of a fit: bars on a terminal, and a few lines per step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from langchain_art.training.report import excluded_counts, node_table, nothing_trained
from langchain_art.training.results import EvalResult, StepRecord
from langchain_art.wire import Trajectory

#: Metrics of the learner that are shown, and their labels.
_SHOWN = {"loss": "loss", "grad_norm": "grad", "logprob_gap_mean": "gap"}


class Display:
    """Prints lines, and progress bars below them, on a console. None: standard output."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._bars = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

    def line(self, text: str, style: str | None = None) -> None:
        """Print one line, above the bars if there are any."""
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print one line in red."""
        self.line(text, "bold red")

    @contextmanager
    def bar(
        self, description: str, total: int, done: int = 0
    ) -> Generator[Callable[..., None], None, None]:
        """A bar for the time of the context; the function that it yields advances it by one."""
        is_inner = bool(self._bars.task_ids)
        with nullcontext() if is_inner else self._bars:
            task = self._bars.add_task(description, total=total, completed=done, note="")

            def advance(note: str = "") -> None:
                self._bars.update(task, advance=1, note=note)

            try:
                yield advance
            finally:
                self._bars.remove_task(task)

    def step(self, record: StepRecord, steps: int, *, first: bool) -> None:
        """Print a step. Its nodes are a table if it is the `first` of a fit, else a line."""
        self.line("  ".join(_headline(record, steps)))
        for figures in _figures(record):
            self.line(f"  {figures}")
        if lost := excluded_counts(record):
            self.line(f"  excluded: {lost}")
        if first and record.nodes:
            self.console.print(node_table(record.nodes, f"Trained by node, step {record.step}"))
        elif record.nodes:
            shown = [
                f"{name} {report.tokens} tokens, |A| {report.advantage_abs:.2f}"
                for name, report in record.nodes.items()
                if report.tokens
            ]
            self.line(f"  trained: {'; '.join(shown) or 'nothing'}")
        for line in nothing_trained(record):
            self.warn(line)

    def eval(self, result: EvalResult) -> None:
        """Print the line of an evaluation."""
        after = "" if result.step is None else f" after step {result.step}"
        self.line(f"held out{after}: {result}  {result.version}  {result.seconds:.1f}s")


def note(run: Trajectory) -> str:
    """A run in words, for a progress bar."""
    return run.status if run.reward is None else f"reward {run.reward:.3g}"


def _headline(record: StepRecord, steps: int) -> list[str]:
    mean, std = record.reward_mean, record.reward_std
    reward = "no rewards" if mean is None else f"reward {mean:.3f}"
    spread = "" if std is None else f" (std {std:.3f})"
    parts = [f"step {record.step:>{len(str(steps))}}/{steps}", reward + spread]
    parts += [f"{policy}@{version}" for policy, version in record.versions.items()]
    resampled = f" ({record.resampled} resampled)" if record.resampled else ""
    parts.append(f"{record.groups} groups{resampled}")
    if record.failed:
        parts.append(f"{record.failed} failed")
    if "total" in record.seconds:
        parts.append(f"{record.seconds['total']:.1f}s")
    return parts


def _figures(record: StepRecord) -> list[str]:
    """The learner's metrics, a line for each policy, and the seconds behind the first."""
    lines: list[str] = []
    for policy, result in record.results.items():
        shown = [(label, result.metrics.get(name)) for name, label in _SHOWN.items()]
        found = [f"{label} {value:.3g}" for label, value in shown if value is not None]
        if found and len(record.results) > 1:
            found[0] = f"{policy}: {found[0]}"
        lines.append("  ".join(found))
    phases = [f"{name} {value:.1f}s" for name, value in record.seconds.items() if name != "total"]
    lines[0] = "  ".join([lines[0], *phases]).strip()
    return [line for line in lines if line]
