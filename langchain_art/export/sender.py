"""Sends what a spool holds, beside the program: a thread that is awaited only at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from langchain_art.errors import ConfigError
from langchain_art.export.destinations import LANGFUSE, Closed, Destination, NotSent, Refused
from langchain_art.export.spool import Spool
from langchain_art.wire.redaction import Redactor

#: Seconds that a thread that is asked to end may take for it.
_GIVES_UP = 0.2
#: Seconds until a destination that did not take a batch is asked again; doubles up to the second.
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


@dataclass
class ExportOutcome:
    """Outcome of the runs of one sender."""

    to: str
    spool: Path
    sent: int = 0
    """Runs that the destination has, with their scores."""
    redacted: int = 0
    """Secrets that were taken out of what was sent."""
    refused: int = 0
    """Files that the destination would never take, put aside."""
    trouble: str | None = None
    """The first thing that went wrong."""
    left: int = 0
    """Runs that are still in the spool."""

    def __str__(self) -> str:
        """One line: what is sent, what is not, where that is, and how it is sent."""
        said = [f"{self.to}: {_runs(self.sent)} sent"]
        command = f"langchain-art review push --spool {self.spool}"
        command += "" if self.to == LANGFUSE else " --to otlp"
        if self.left:
            said.append(f"{self.left} are in {self.spool}: `{command}` sends them")
        if self.refused:
            aside = self.spool / "refused"
            said.append(
                f"{self.refused} files were refused, see {aside}: `{command}` sends them again"
            )
        if self.redacted:
            said.append(f"{self.redacted} secrets were redacted")
        return "; ".join(said) + "."


def _runs(count: int) -> str:
    return f"{count} run" + ("" if count == 1 else "s")


class Sender:
    """Sends a spool's files, one after the other.

    Args:
        spool: what to send.
        to: where.
        warn: called, once, with the first problem.
    """

    def __init__(self, spool: Spool, to: Destination, warn: Callable[[str], None]) -> None:
        self._spool = spool
        self._to = to
        self._warn = warn
        self._redactor = Redactor()
        self._wake, self._end = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.outcome = ExportOutcome(to.name, spool.folder)

    def wake(self) -> None:
        """There is something to send."""
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="export", daemon=True)
            self._thread.start()

    def close(self, seconds: float) -> ExportOutcome:
        """Wait for what is being sent, for so long at most; the rest stays in the spool."""
        self._end.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(seconds)
        self._to.close()  # ends its pause between two attempts
        if self._thread is not None:
            self._thread.join(_GIVES_UP)
        self.outcome.left = self._spool.count()
        if self.outcome.left and self.outcome.trouble is None:
            left = f"time was up before it had taken the last {self.outcome.left}"
            self._trouble(NotSent(left))
        return replace(self.outcome)

    def send_all(self) -> ExportOutcome:
        """Send all files now, in the caller's thread, each once; what was refused before, too.

        Raises:
            ConfigError: another process sends this spool just now, or a file is none of a spool.
        """
        with self._spool.alone() as alone:
            if not alone:
                raise ConfigError(
                    f"Another process sends {self._spool.folder} just now: wait until it has ended."
                )
            self._spool.take_back()  # by a wrong address, perhaps
            try:
                self._pass()
            except NotSent as error:
                self._trouble(error)
        self._to.close()
        self.outcome.left = self._spool.count()
        return self.outcome

    def _run(self) -> None:
        pause = _PAUSE
        while True:
            self._wake.wait()
            self._wake.clear()
            ending = self._end.is_set()  # what was written before that is sent by this pass
            try:
                with self._spool.alone() as alone:
                    if alone:  # else somebody else sends it
                        self._pass()
                pause = _PAUSE
            except (Closed, ConfigError, OSError) as error:
                self._trouble(error)
                return
            except NotSent as error:
                self._trouble(error)
                self._wake.set()
                self._end.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            if ending:
                return

    def _pass(self) -> None:
        """Send every file once. Raises NotSent with the first that is not taken."""
        for path in self._spool.files():
            batch, what = self._spool.read(path)
            try:
                if what == "all":
                    self._to.send_spans(batch, self._redactor)
                    if self._to.has_scores:
                        path = self._spool.spans_sent(path)
                self._to.send_scores(batch, self._redactor)
            except Refused as error:
                aside = self._spool.refuse(path)
                self.outcome.refused += 1
                self._trouble(error, f" ({aside})")
                continue
            self._spool.sent(path)
            self.outcome.sent += len(batch.runs)
            self.outcome.redacted = self._redactor.count

    def _trouble(self, error: Exception, where: str = "") -> None:
        if self.outcome.trouble is None:
            self.outcome.trouble = f"{error}{where}"
            self._warn(f"{self._to.name} did not take runs: {self.outcome.trouble}")
