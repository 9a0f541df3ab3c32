"""The spool: finished runs on disk until they are sent, and the thread that sends them.

There is one file a batch.
``NAME.runs`` holds runs of which nothing is sent, ``NAME.scores`` those whose spans the destination
has and whose scores it has not, ``refused/`` what it does not take until somebody asks again. A
file appears under its name when all of it is on disk, and goes when all of it is sent; ``sent``
then has its name, so that a step which a resumed fit repeats is not sent twice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from langchain_art.errors import ConfigError
from langchain_art.export.destinations import LANGFUSE, Closed, Destination, NotSent, Refused
from langchain_art.export.records import ExportBatch, ExportedRun
from langchain_art.packages import locked, replace_file
from langchain_art.wire.identifiers import unwritable
from langchain_art.wire.redaction import Redactor
from langchain_art.wire.trajectories import storable

#: Most runs and most bytes of one file. Written out for a destination, prompts repeat what was said
#: before: a request is several times as large.
RUNS, BYTES = 32, 512 * 1024
_UNSENT, _SCORES = ".runs", ".scores"


class Spool:
    """A folder of batches. Safe for one writer and any number of senders, which take turns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(
        self,
        name: str,
        runs: Sequence[ExportedRun],
        experiments: dict[str, dict[str, float]] | None = None,
    ) -> list[Path]:
        """Put runs on disk, in as many files as they need; nothing that was sent before.

        The batch's `name` is unique; its files are ``NAME-000-32.runs`` and so on, the last number
        that of the runs in it. The last file has the `experiments`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        sent, files = self._sent(), list[Path]()
        parts = list(_parts([_storable(run) for run in runs]))
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            batch = ExportBatch(runs=tuple(part), experiments=(experiments or {}) if last else {})
            path = self.folder / f"{name}-{number:03}-{len(part)}{_UNSENT}"
            if path.stem in sent or path.with_suffix(_SCORES).exists():
                continue
            content = batch.model_dump_json(exclude_defaults=True, fallback=str).encode()
            replace_file(path, content, 0o600)  # what agents said is in it
            files.append(path)
        return files

    def files(self) -> list[Path]:
        """Files not sent yet, oldest names first."""
        found = (path for path in self.folder.glob("*-*-*") if path.suffix in (_UNSENT, _SCORES))
        return sorted(found)

    def read(self, path: Path) -> tuple[ExportBatch, Literal["all", "scores"]]:
        """A file's batch, and what of it is to be sent.

        Raises:
            ConfigError: it is no file of a spool, or of another release's.
        """
        try:
            batch = ExportBatch.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError(
                f"{path} is no file of this release's spool: {error.errors()[0]['msg']}. Move it "
                "away, or send it with the release that wrote it."
            ) from error
        return batch, "scores" if path.suffix == _SCORES else "all"

    def spans_sent(self, path: Path) -> Path:
        """Note that a file's spans are sent; returns its new name."""
        return path.rename(path.with_suffix(_SCORES))

    def sent(self, path: Path) -> None:
        """Remove a file of which all is sent."""
        with (self.folder / "sent").open("a") as file:
            file.write(f"{path.stem}\n")
            file.flush()
            os.fsync(file.fileno())
        path.unlink()

    def refuse(self, path: Path) -> Path:
        """Put aside a file that the destination would never take; returns where it is."""
        aside = self.folder / "refused" / path.name
        aside.parent.mkdir(exist_ok=True)
        return path.rename(aside)

    def count(self) -> int:
        """Runs that are not sent yet, as the files' names tell."""
        return sum(int(path.stem.rpartition("-")[2]) for path in self.files())

    def alone(self) -> AbstractContextManager[bool]:
        """Lock the folder for its only sender while the scope lasts; False if another has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return locked(self.folder / "lock")

    def _sent(self) -> set[str]:
        path = self.folder / "sent"
        return set(path.read_text().split("\n")) if path.exists() else set()


def _storable(run: ExportedRun) -> ExportedRun:
    """The run, or what of it can be written (`trajectories.storable`)."""
    if unwritable(run) is None:
        return run
    labels = run.labels
    if unwritable(labels) is not None:
        labels = labels.model_copy(update={"session": None, "user": None, "tags": ()})
    spans = [
        span
        if unwritable(span) is None
        else span.model_copy(update={"input": None, "output": None, "error": None})
        for span in run.spans
    ]
    known = {"trajectory": storable(run.trajectory), "spans": tuple(spans), "labels": labels}
    return run.model_copy(update=known)


def _parts(runs: Sequence[ExportedRun]) -> Iterator[list[ExportedRun]]:
    part, size = list[ExportedRun](), 0
    for run in runs:
        one = sum(len(str(turn.messages)) for turn in run.trajectory.turns)
        if part and (len(part) == RUNS or size + one > BYTES):
            yield part
            part, size = [], 0
        part.append(run)
        size += one
    if part:
        yield part


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
    left: int = 0

    def __str__(self) -> str:
        """One line: what is sent, what is not, where that is, and how it is sent."""
        said = [f"{self.to}: {self.sent} run{'' if self.sent == 1 else 's'} sent"]
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


class Sender:
    """Sends a spool's files, one after the other; `warn` is called once, with the first problem."""

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
            self._thread.join(0.2)
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
            folder = self._spool.folder
            for path in (folder / "refused").glob("*"):  # by a wrong address, perhaps
                path.rename(folder / path.name)
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
