"""Progress of a fit: bars on a terminal, and a few lines per step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from threading import Event, Thread
from typing import Any

from rich import progress
from rich.console import Console, RenderableType
from rich.table import Column
from rich.text import Text

from langchain_art._notebook import Cell
from langchain_art.training.records import EvalResult, FitResult, StepRecord
from langchain_art.training.report import (
    duration,
    eval_lines,
    excluded_counts,
    node_table,
    nothing_trained,
    overflowed,
    summary_view,
)
from langchain_art.wire import Trajectory

#: Metrics of the learner that are shown, and their labels.
_SHOWN = {
    "loss": "loss",
    "grad_norm": "grad",
    "logprob_gap_mean": "gap",
    "learning_rate": "rate",
    "step_kl": "kl",
}
#: Where no bar can be drawn (a log file): seconds until something that lasts is spoken of, and
#: until it is spoken of again.
_SILENCE, _REPEAT = 1.5, 30.0


def _column(width: int, *, right: bool = False) -> Column:
    justify = "right" if right else "left"
    return Column(width=width, no_wrap=True, overflow="ellipsis", justify=justify)


class Display:
    """Prints lines, and progress bars below them, on a console. None: standard output.

    A notebook's cell is redrawn in place. Where the console is neither that nor a terminal, what
    takes longer than two seconds is reported in lines.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        # 77 characters with the spaces between them: they fit a terminal of 80, and never move.
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}", table_column=_column(11)),
            progress.BarColumn(bar_width=10, table_column=_column(10)),
            progress.MofNCompleteColumn(table_column=_column(9, right=True)),
            progress.TextColumn("{task.fields[note]}", table_column=_column(28)),
            progress.TimeElapsedColumn(table_column=_column(7, right=True)),
            progress.TimeRemainingColumn(table_column=_column(7, right=True)),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._in_notebook = self.console.is_jupyter and self.console.file is sys.stdout
        self._cell: Cell | None = None

    def line(self, text: str, style: str = "") -> None:
        """Print one line, above the bars if there are any."""
        self._print(Text(text, style), soft_wrap=True)

    def _print(self, shown: RenderableType, *, soft_wrap: bool = False) -> None:
        if not self._in_notebook:
            self.console.print(shown, soft_wrap=soft_wrap)
            return
        self._shown_in().add(shown)

    def _shown_in(self) -> Cell:
        if self._cell is None or (self._cell.over and not self._bars.tasks):
            self._cell = Cell()
        return self._cell

    def warn(self, text: str) -> None:
        """Print one line in red."""
        self.line(text, "bold red")

    @contextmanager
    def bar(
        self, description: str, total: int, done: int = 0
    ) -> Generator[Callable[..., None], None, None]:
        """A bar for the time of the context; the function that it yields advances it by one."""
        with nullcontext() if self._bars.tasks else self._whole():
            fields: dict[str, Any] = {"note": "", "due": _SILENCE}
            task = self._bars.add_task(description, total=total, completed=done, **fields)

            def advance(note: str = "", by: int = 1) -> None:
                self._bars.update(task, advance=by, note=note)

            try:
                yield advance
            finally:
                self._bars.remove_task(task)

    @contextmanager
    def _whole(self) -> Generator[None, None, None]:
        """Around the outermost bar: draws, or tells in lines, whatever is under way."""
        if self.console.is_terminal:
            with self._bars:
                yield
            return
        ended = Event()

        def tell() -> None:
            while not ended.wait(1.0 if self._in_notebook else 0.25):
                if self._in_notebook:
                    self._shown_in().draw(self._bars.get_renderable())
                    continue
                for task in self._bars.tasks[-1:]:
                    if (elapsed := task.elapsed or 0.0) >= task.fields["due"]:
                        task.fields["due"] = elapsed + _REPEAT
                        count = f"{task.completed:.0f}/{task.total:.0f}"
                        words = f"{task.description} {count}  {task.fields['note']}"
                        self.line(f"{words.strip()}  {duration(elapsed)}")

        teller = Thread(target=tell, name="progress", daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()
            if self._in_notebook:
                self._shown_in().draw()  # without bars

    def step(
        self, record: StepRecord, steps: int, *, first: bool, left: float | None = None
    ) -> None:
        """Print a step. Its nodes are a table if it is the `first` of a fit, else a line.

        `left`: seconds that the other steps will take.
        """
        headline = _headline(record, steps)
        if left:
            headline.append(f"{duration(left)} left")
        self.line("  ".join(headline))
        for figures in _figures(record):
            self.line(f"  {figures}")
        if lost := excluded_counts(record):
            self.line(f"  excluded: {lost}")
        if first and record.nodes:
            title, rewards = f"Trained by node, step {record.step}", record.rewards_by_node
            worth = {name: f"{reward:.3f}" for name, reward in rewards.items()}
            self._print(node_table(record.nodes, title, worth))
        elif record.nodes:
            rewards = record.rewards_by_node
            shown = [
                (f"{name} reward {rewards[name]:.3f}, " if name in rewards else f"{name} ")
                + f"{report.tokens} tokens, |A| {report.advantage_abs:.2f}"
                for name, report in record.nodes.items()
                if report.tokens
            ]
            self.line(f"  trained: {'; '.join(shown) or 'nothing'}")
        for result in record.results.values():
            for line in overflowed(result):
                self.warn(line)
        for line in nothing_trained(record):
            self.warn(line)

    def summary(self, result: FitResult) -> None:
        """Print the end of a fit."""
        self._print(summary_view(result))

    def stopped(self, error: BaseException, why: str) -> None:
        """Print why a fit was stopped, which is shown in place of the traceback."""
        self.line(why)
        if self._in_notebook:
            interrupted: Any = error
            interrupted._render_traceback_ = lambda: [why]
            return
        show = sys.excepthook

        def show_others(kind: type[BaseException], ended_by: BaseException, trace: Any) -> None:
            found: BaseException | None = ended_by
            while found is not None and found is not error:
                found = found.__context__  # asyncio raises KeyboardInterrupt for a CancelledError
            if found is None or not isinstance(ended_by, KeyboardInterrupt):
                show(kind, ended_by, trace)

        sys.excepthook = show_others

    def eval(self, result: EvalResult) -> None:
        """Print the lines of an evaluation."""
        for line in eval_lines(result):
            self.line(line)


class MeanReward:
    """The mean total return of the runs so far, in words for a progress bar."""

    def __init__(self) -> None:
        self._sum, self._scored, self._failed = 0.0, 0, 0

    def __call__(self, run: Trajectory) -> str:
        """The words after one more run."""
        self._failed += run.status == "failed"
        if (worth := run.total_return) is not None:
            self._sum, self._scored = self._sum + worth, self._scored + 1
        mean = f"mean reward {self._sum / self._scored:.3f}" if self._scored else "no rewards yet"
        return mean + (f", {self._failed} failed" if self._failed else "")


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
    if record.retried:
        parts.append(f"{record.retried} repeated")
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
