"""A tracker that fails, hangs or comes back: the fit goes on, and nothing is lost or sent twice."""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

from langchain_art.trackers.tracker_thread import (
    AdapterFiles,
    FitCard,
    TrackedRecord,
    TrackerRun,
    TrackerThread,
)


class Recording:
    """A tracker that keeps what it gets; the first `failures` of its calls of `log` raise."""

    name = "recording"
    settles = 0.0

    def __init__(self, *, failures: int = 0, hang: Event | None = None) -> None:
        self.failures, self.hang = failures, hang
        self.former: TrackerRun | None = None
        self.records: list[int] = []
        self.adapters: list[str] = []
        self.finished = 0

    def start(self, fit: FitCard, former: TrackerRun | None) -> TrackerRun:
        if self.hang is not None:
            self.hang.wait(60)
        self.former = former
        return TrackerRun(f"run-{fit.fit_id}", former.sent if former else 0)

    def log(self, record: TrackedRecord) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the server is\naway")
        self.records.append(record.number)

    def keep(self, adapter: AdapterFiles) -> bool:
        self.adapters.append(adapter.name)
        return True

    def finish(self) -> str:
        self.finished += 1
        return "seen there"


class BrokenStart(Recording):
    def start(self, fit: FitCard, former: TrackerRun | None) -> TrackerRun:
        raise RuntimeError("no key")


def record(number: int) -> TrackedRecord:
    return TrackedRecord(number, number, {"train/reward": number / 10})


def begun(
    tracker: Recording, folder: Path, said: list[str], known: int = 0, fit_id: str = "f1"
) -> TrackerThread:
    """The thread of a fit that has `known` records when it begins."""
    history = [record(number) for number in range(known)]
    return TrackerThread(tracker, FitCard(fit_id, "fit", folder, {"seed": 0}), history, said.append)


def wait_for(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.005)


def fit(tracker: Recording, folder: Path, known: int, new: int, *, fit_id: str = "f1") -> list[str]:
    """A fit that has `known` records when it begins and makes `new` ones; what was said."""
    said: list[str] = []
    thread = begun(tracker, folder, said, known, fit_id)
    for number in range(known, known + new):
        thread.put(record(number))
    thread.put(None)
    said.append(thread.outcome(60))
    return said


def test_a_resumed_fit_sends_what_the_run_lacks_and_nothing_twice(tmp_path: Path) -> None:
    first, second, third = Recording(), Recording(), Recording()
    assert fit(first, tmp_path, 0, 3) == ["recording: records: 3. seen there"]
    fit(second, tmp_path, 5, 2)  # two records were kept, and the process died before they were sent
    assert second.former == TrackerRun("run-f1", 3)
    assert first.records + second.records == list(range(7))
    fit(third, tmp_path, 0, 2, fit_id="f2")  # fresh=True: another fit in the same folder
    assert third.former is None and third.records == [0, 1]


def test_what_was_not_taken_is_offered_again_and_said_once(tmp_path: Path) -> None:
    tracker, said = Recording(failures=2), list[str]()
    thread = begun(tracker, tmp_path, said)
    for number, failures in enumerate([1, 0, 0, 0]):
        thread.put(record(number))
        wait_for(lambda left=failures: tracker.failures <= left)
    wait_for(lambda: tracker.records == [0, 1, 2, 3])
    thread.put(AdapterFiles("p", tmp_path, ("best",), {}))
    thread.put(None)
    said.append(thread.outcome(60))
    assert said[0].startswith("recording: ConnectionError: the server is away. The fit goes on")
    assert said[1:] == [
        "recording: all is there. The first error: ConnectionError: the server is away. seen there"
    ]
    assert tracker.adapters == ["p"] and tracker.finished == 1


def test_a_tracker_that_never_starts_is_said_once_and_the_next_fit_sends_all(
    tmp_path: Path,
) -> None:
    said = fit(BrokenStart(), tmp_path, 0, 3)
    assert len(said) == 2 and said[0].startswith("recording: RuntimeError: no key.")
    assert "3 records and adapters are missing there" in said[1]
    later = Recording()
    fit(later, tmp_path, 3, 1)
    assert later.records == [0, 1, 2, 3]


def test_a_tracker_that_hangs_holds_up_nothing(tmp_path: Path) -> None:
    let_go = Event()
    tracker, said = Recording(hang=let_go), list[str]()
    thread = begun(tracker, tmp_path, said)
    for number in range(3):
        thread.put(record(number))
    thread.put(None)
    assert "recording: it has not finished" in thread.outcome(0.05)
    assert not tracker.records, "it was waited for"
    let_go.set()


def test_a_broken_file_of_progress_is_said(tmp_path: Path) -> None:
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "recording.json").write_text("{")
    tracker = Recording()
    said = fit(tracker, tmp_path, 2, 1)
    assert "cannot be read, so a new run begins" in said[0]
    assert tracker.records == [0, 1, 2]
