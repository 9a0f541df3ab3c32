"""What a person sees of a fit: bars on a terminal, one plain line per step everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from langchain_art.history import EvalResult, StepRecord


class Display:
    """Lines, and bars below them while something goes on.

    Args:
        console: where to; None: standard output.
    """

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

    def line(self, text: str) -> None:
        """Print one line, above the bars if there are any."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def bar(
        self, description: str, total: int, done: int = 0
    ) -> Generator[Callable[..., None], None, None]:
        """A bar while the scope lasts; call what it yields to advance by one, with a note."""
        outermost = not self._bars.task_ids
        task = self._bars.add_task(description, total=total, completed=done, note="")
        if outermost:
            self._bars.start()

        def advance(note: str = "") -> None:
            self._bars.update(task, advance=1, note=note)

        try:
            yield advance
        finally:
            self._bars.remove_task(task)
            if outermost:
                self._bars.stop()

    def step(self, record: StepRecord, steps: int, policy: str) -> None:
        """The line of a finished step."""
        mean, std = record.reward_mean, record.reward_std
        reward = "no rewards" if mean is None else f"reward {mean:.3f}"
        spread = "" if std is None else f" (std {std:.3f})"
        parts = [
            f"step {record.step:>{len(str(steps))}}/{steps}",
            reward + spread,
            f"{policy}@{record.version}",
            f"{record.groups} groups",
        ]
        parts += [f"{name} {record.metrics[name]:.4g}" for name in SHOWN if name in record.metrics]
        parts += [f"{name} {value:.1f}s" for name, value in record.seconds.items()]
        if record.failed:
            parts.append(f"{record.failed} failed")
        if record.dropped:
            dropped = ", ".join(f"{name} {n}" for name, n in sorted(record.dropped.items()))
            parts.append(f"dropped: {dropped}")
        self.line("  ".join(parts))

    def eval(self, result: EvalResult) -> None:
        """The line of an evaluation."""
        after = "" if result.step is None else f" after step {result.step}"
        self.line(f"held out{after}: {result}  {result.version}  {result.seconds:.1f}s")


#: Metrics of the learner that stand on a step's line, where it reports them.
SHOWN = ("loss", "grad_norm", "logprob_gap_mean")
