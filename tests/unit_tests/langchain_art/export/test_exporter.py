"""Exporters, and files of runs that are not sent: whole or not there, and sent once."""

import gc
import stat
import threading
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from langchain_art.errors import ConfigError
from langchain_art.export import spool as spool_module
from langchain_art.export.destinations import NotSent, Refused
from langchain_art.export.exporter import Exporter, production_run, push_spool
from langchain_art.export.records import ExportBatch
from langchain_art.export.spool import RUNS, Sender, Spool
from langchain_art.tracing.scope import capture
from langchain_art.wire.redaction import Redactor
from tests.unit_tests.langchain_art.export.examples import exported


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk-lf-1")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-lf-1")
    monkeypatch.delenv("LANGFUSE_SAMPLE_RATE", raising=False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"to": "phoenix"}, "expected 'langfuse' or 'otlp'"),
        ({"to": "otlp"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"sample_rate": 1.5}, "from 0 to 1"),
        ({"sample_rate": float("nan")}, "from 0 to 1"),
        ({"name": ""}, "1 to 100"),
        ({"tags": "one"}, "a list of texts"),
    ],
)
def test_what_it_cannot_do_is_refused_at_once(
    given: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=words):
        Exporter(**given)  # type: ignore[arg-type]


def test_missing_keys_and_a_wrong_rate_of_the_environment_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LANGFUSE_SAMPLE_RATE", "often")
    with pytest.raises(ConfigError, match="'often'"):
        Exporter()
    monkeypatch.setenv("LANGFUSE_SAMPLE_RATE", "0.25")
    assert Exporter().sample_rate == 0.25
    monkeypatch.delenv("LANGFUSE_SECRET_KEY")
    with pytest.raises(ConfigError, match="LANGFUSE_SECRET_KEY"):
        Exporter()
    with pytest.raises(ConfigError, match="expected an Exporter"):
        capture(export="langfuse")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a folder"):
        push_spool(tmp_path / "none")


def test_a_sample_is_the_same_for_everyone_and_as_large_as_asked() -> None:
    exporter = Exporter(sample_rate=0.25)
    chosen = [exporter.chosen(f"run-{n}") for n in range(4000)]
    assert 0.22 < sum(chosen) / 4000 < 0.28
    again, none, every = (Exporter(sample_rate=rate) for rate in (0.25, 0.0, 1.0))
    assert chosen == [again.chosen(f"run-{n}") for n in range(4000)]
    assert not any(none.chosen(f"run-{n}") for n in range(100))
    assert all(every.chosen(f"run-{n}") for n in range(100))


def test_a_run_of_production_brings_its_session_and_user() -> None:
    about = {"langfuse_session_id": "s", "langfuse_user_id": 7, "langfuse_tags": ["a"]}
    with capture(metadata=about) as run:
        pass
    labels = production_run(run, "mail", ["b"]).labels
    assert (labels.session, labels.user, labels.tags) == ("s", "7", ("b", "a"))
    assert (labels.name, labels.environment) == ("mail", "production")
    server_has = production_run(exported().trajectory, None, ())
    assert server_has.labels.session is None and len(server_has.spans) == 4


def test_a_scope_that_the_collector_ends_while_another_is_exported(tmp_path: Path) -> None:
    class Collecting(list[Any]):
        def append(self, value: Any) -> None:
            gc.collect()
            super().append(value)

    class Reader:
        def __init__(self) -> None:
            self.itself, self.items = self, self.read()

        def read(self) -> Iterator[int]:
            with capture(export=exporter):
                yield 1

    with Exporter(spool=tmp_path) as exporter:
        outbox = exporter.outbox()
        outbox._waiting = waiting = Collecting()
        gc.disable()
        copy_context().run(lambda: next(Reader().items))  # which is left open there
        adding = threading.Thread(target=exporter.add, args=[exported().trajectory], daemon=True)
        adding.start()
        adding.join(30)
        gc.enable()
        assert not adding.is_alive()
        assert len(waiting) == 2
        waiting.clear()


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


def test_a_batch_is_files_that_a_request_can_take_and_is_sent_once(spool: Spool) -> None:
    files = spool.write("a", runs(RUNS + 1), {"e": {"m": 1.0}})
    assert [len(spool.read(path)[0].runs) for path in files] == [RUNS, 1]
    assert [bool(spool.read(path)[0].experiments) for path in files] == [False, True]
    assert spool.count() == RUNS + 1
    for path in files:
        spool.sent(path)
    assert spool.write("a", runs(RUNS + 1)) == [] and spool.count() == 0
    (path,) = spool.write("b", [exported()])
    half = spool.spans_sent(path)
    assert spool.write("b", [exported()]) == [] and spool.read(half)[1] == "scores"


def test_what_was_refused_is_sent_when_it_is_asked_for(spool: Spool) -> None:
    """A wrong address may refuse everything; its spans and the scores of others apart."""
    for name in "abc":
        spool.write(name, [exported(name)])
    said: list[str] = []
    nowhere = Wire(Refused("status 400"), Refused("status 400"), scores=Refused("status 400"))
    found = Sender(spool, nowhere, said.append).send_all()
    assert (found.sent, found.refused, found.left) == (0, 3, 0)
    command = f"`langchain-art review push --spool {spool.folder}` sends them again"
    assert "3 files were refused" in str(found) and command in str(found)
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
    sender = Sender(spool, Wire(NotSent("one"), NotSent("two")), said.append)
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


def test_one_sender_at_a_time(spool: Spool) -> None:
    spool.write("a", [exported()])
    with spool.alone() as alone:
        assert alone
        with pytest.raises(ConfigError, match="Another process sends"):
            Sender(spool, Wire(), print).send_all()
