"""A tracker that fails, hangs or comes back: the fit goes on, and nothing is lost or sent twice."""

import importlib.util
import re
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_art.errors import ConfigError
from langchain_art.trackers import choice
from langchain_art.trackers.choice import KNOWN, chosen_trackers
from langchain_art.trackers.tracker_thread import (
    AdapterFiles,
    FitCard,
    TrackedRecord,
    TrackerRun,
    TrackerThread,
)
from langchain_art.trackers.wandb_tracker import WandbTracker
from langchain_art.training.trainer import Trainer


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


def names(trackers: Any) -> list[str]:
    return [one.name for one in chosen_trackers(trackers)]


@pytest.mark.parametrize("variable", ["WANDB_PROJECT", "WANDB_MODE"])
def test_the_environment_alone_asks_for_wandb(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert names(None) == []
    monkeypatch.setenv(variable, "offline")
    assert names(None) == ["wandb"]
    assert names([]) == [], "an empty list asks for none"
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert names(None) == []


def test_a_name_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer("p", trackers=["tensorbord"])
    assert all(name in str(caught.value) for name in ("'tensorbord'", *KNOWN))
    has: dict[str, Any] = dict.fromkeys(("start", "log", "keep", "finish"), print)
    assert names([SimpleNamespace(**has, name="mine", settles=0.0)]) == ["mine"]
    wrong: list[tuple[Any, str]] = [
        ("wandb", r"expected a list: trackers=\['wandb'\]"),
        (["wandb", WandbTracker()], "each only once"),
        ([object()], "an object with the methods start, log, keep, finish"),
        ([SimpleNamespace(**has, name="mine")], "a text `name` and a number `settles`"),
        ([SimpleNamespace(**has, settles=0.0)], "a text `name` and a number `settles`"),
    ]
    for given, words in wrong:
        with pytest.raises(ConfigError, match=words):
            chosen_trackers(given)
    with pytest.raises(ConfigError, match="got the W&B mode 'offlin'"):
        WandbTracker(mode="offlin")


def test_a_missing_package_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, missing, install in (
        ("wandb", "wandb", "pip install 'langchain-art[wandb]'"),
        ("comet_ml", "comet_ml", "pip install 'langchain-art[trackers]' comet-ml"),
        ("tensorboard", "accelerate", "pip install 'langchain-art[trackers]'."),
    ):

        def find_spec(module: str, missing: str = missing) -> ModuleSpec | None:
            if module != missing:
                return importlib.util.find_spec("json")
            return ModuleSpec(module, None) if module == "wandb" else None  # a folder ./wandb

        monkeypatch.setattr(choice, "find_spec", find_spec)
        with pytest.raises(ConfigError, match=re.escape(install)):
            Trainer("p", trackers=[name])
