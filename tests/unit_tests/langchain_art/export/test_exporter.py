import gc
import threading
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from langchain_art.errors import ConfigError
from langchain_art.export.exporter import Exporter, production_run, push_spool
from langchain_art.tracing.scope import capture
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
        ({"sample_rate": True}, "from 0 to 1"),
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LANGFUSE_SAMPLE_RATE", "often")
    with pytest.raises(ConfigError, match="'often'"):
        Exporter()
    monkeypatch.setenv("LANGFUSE_SAMPLE_RATE", "0.25")
    assert Exporter().sample_rate == 0.25
    monkeypatch.delenv("LANGFUSE_SECRET_KEY")
    with pytest.raises(ConfigError, match="LANGFUSE_SECRET_KEY"):
        Exporter()


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


def test_no_exporter_and_no_spool_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected an Exporter"):
        capture(export="langfuse")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a folder"):
        push_spool(tmp_path / "none")
