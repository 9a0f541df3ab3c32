"""Files of runs that are not sent: whole or not there, and sent once."""

import stat
import threading
from pathlib import Path

import pytest

from langchain_art.errors import ConfigError
from langchain_art.export import spool as spool_module
from langchain_art.export.destinations import Closed, NotSent, Refused
from langchain_art.export.records import ExportBatch
from langchain_art.export.spool import RUNS, Sender, Spool
from langchain_art.wire.redaction import Redactor
from tests.unit_tests.langchain_art.export.examples import exported


class Wire:
    """A destination that does what it is told to."""

    name, has_scores = "Langfuse", True

    def __init__(self, *spans: Exception | None, scores: Exception | None = None) -> None:
        self.answers, self.scores = list(spans), scores
        self.got: list[tuple[str, int]] = []

    def send_spans(self, batch: ExportBatch, redactor: Redactor) -> None:
        if self.answers and (error := self.answers.pop(0)) is not None:
            raise error
        self.got.append(("spans", len(batch.runs)))

    def send_scores(self, batch: ExportBatch, redactor: Redactor) -> None:
        if self.scores is not None:
            raise self.scores
        self.got.append(("scores", len(batch.runs)))

    def close(self) -> None:
        pass


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


def runs(count: int) -> list[object]:
    return [exported(f"run-{n}") for n in range(count)]


def test_what_is_written_is_read_and_private(spool: Spool) -> None:
    (path,) = spool.write("fit.step-1", [exported()], {"e": {"reward_mean": 1.0}})
    batch, what = spool.read(path)
    assert (batch.runs, what) == ((exported(),), "all")
    assert batch.experiments == {"e": {"reward_mean": 1.0}}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in spool.folder.iterdir()] == [path.name]
    path.write_text("{")
    with pytest.raises(ConfigError, match="no file of this release's spool"):
        spool.read(path)


def test_a_batch_is_files_that_a_request_can_take(spool: Spool) -> None:
    files = spool.write("a", runs(RUNS + 1), {"e": {"m": 1.0}})
    assert [len(spool.read(path)[0].runs) for path in files] == [RUNS, 1]
    assert [bool(spool.read(path)[0].experiments) for path in files] == [False, True]
    assert spool.count() == RUNS + 1


def test_what_was_sent_is_not_sent_again(spool: Spool) -> None:
    (path,) = spool.write("a", [exported()])
    spool.sent(path)
    assert spool.write("a", [exported()]) == [] and spool.count() == 0
    (path,) = spool.write("b", [exported()])
    half = spool.spans_sent(path)
    assert spool.write("b", [exported()]) == [] and spool.read(half)[1] == "scores"


def test_what_is_refused_is_put_aside_and_the_rest_is_sent(spool: Spool) -> None:
    for name in "abc":
        spool.write(name, [exported(name)])
    said: list[str] = []
    found = Sender(spool, Wire(None, Refused("too large")), said.append).send_all()
    assert (found.sent, found.refused, found.left) == (2, 1, 0)
    (aside,) = (spool.folder / "refused").iterdir()
    assert aside.name.startswith("b-") and len(said) == 1 and "too large" in str(said)
    command = f"`langchain-art review push --spool {spool.folder}` sends them again"
    assert "1 files were refused" in str(found) and command in str(found)


def test_what_was_refused_is_sent_when_it_is_asked_for(spool: Spool) -> None:
    """A wrong address may refuse everything; its spans and the scores of others apart."""
    for name in "abc":
        spool.write(name, [exported(name)])
    said: list[str] = []
    nowhere = Wire(Refused("status 400"), Refused("status 400"), scores=Refused("status 400"))
    found = Sender(spool, nowhere, said.append).send_all()
    assert (found.sent, found.refused, found.left) == (0, 3, 0)
    again = Wire(None, Refused("too large"))
    found = Sender(spool, again, said.append).send_all()
    assert (found.sent, found.refused, found.left) == (2, 1, 0)
    assert again.got == [("spans", 1), ("scores", 1), ("scores", 1)]  # of c the spans are there
    (aside,) = (spool.folder / "refused").iterdir()
    assert aside.name.startswith("b-")


def test_a_thread_does_not_send_again_what_was_refused(spool: Spool) -> None:
    spool.write("a", [exported()])
    Sender(spool, Wire(Refused("too large")), print).send_all()
    wire, said = Wire(), list[str]()
    sender = Sender(spool, wire, said.append)
    sender.wake()
    found = sender.close(5.0)
    assert (found.sent, wire.got, said) == (0, [], [])


def test_a_thread_tries_again_and_warns_once(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "_PAUSE", 0.01)
    said: list[str] = []
    wire = Wire(NotSent("one"), NotSent("two"))
    sender = Sender(spool, wire, said.append)
    spool.write("a", [exported()])
    sender.wake()
    while spool.count():
        pass
    found = sender.close(5.0)
    assert (found.sent, found.left, found.trouble) == (1, 0, "one") and len(said) == 1


def test_a_slow_destination_is_not_said_to_be_silent(spool: Spool) -> None:
    said: list[str] = []

    class Slow(Wire):
        def send_spans(self, batch: ExportBatch, redactor: Redactor) -> None:
            super().send_spans(batch, redactor)
            if len(self.got) > 2:
                done.set()
                ended.wait(60)

    done, ended = threading.Event(), threading.Event()
    for name in "abc":
        spool.write(name, [exported(name)])
    sender = Sender(spool, Slow(), said.append)
    sender.wake()
    assert done.wait(60)
    found = sender.close(0.01)
    ended.set()
    assert (found.sent, found.left) == (1, 2)
    assert said == ["Langfuse did not take runs: time was up before it had taken the last 2"]


def test_wrong_keys_end_the_thread_and_keep_the_runs(spool: Spool) -> None:
    said: list[str] = []
    sender = Sender(spool, Wire(Closed("status 401")), said.append)
    spool.write("a", [exported()])
    sender.wake()
    found = sender.close(5.0)
    assert (found.sent, found.left) == (0, 1) and len(said) == 1
    command = f"`langchain-art review push --spool {spool.folder}` sends them"
    assert command in str(found)


def test_one_sender_at_a_time(spool: Spool) -> None:
    spool.write("a", [exported()])
    with spool.alone() as alone:
        assert alone
        with pytest.raises(ConfigError, match="Another process sends"):
            Sender(spool, Wire(), print).send_all()
