"""Fixtures that everything shares. The server is the real one, with a real small model."""

from __future__ import annotations

import functools
import gc
import itertools
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer.main
from hypothesis import HealthCheck, settings

from tests.support import seeds
from tests.support.live_server import FaultyServer, ForkedServer, LiveServer, RuleServer
from tests.support.postgres import Postgres, programs
from tests.support.soak import in_soak

if TYPE_CHECKING:
    from langchain_art_server.storage.store import Store

# Processes run side by side, so an example may be slow for reasons that are not its own. The same
# examples each time; others, and those that failed first, where tests are to explore.
settings.register_profile(
    "side-by-side",
    deadline=None,
    derandomize=not seeds.explores(),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("side-by-side")

# An application is made into a command once: it takes 80 ms, and tests run hundreds of commands.
typer.main.get_command = functools.cache(typer.main.get_command)

# No test loads a model from the hub. Read when huggingface_hub is imported, also where servers are
# forked from (`tests.support.forked_start`).
os.environ.setdefault("HF_HUB_OFFLINE", "1")

#: What names a server and a key for whoever names none. No test asks the one that a shell names.
SERVER = ("ART_BASE_URL", "ART_API_KEY")
for name in SERVER:
    os.environ.pop(name, None)

#: What the shared server's page is told of Langfuse.
LANGFUSE_PROJECT = "https://langfuse.example/project/mails"
#: Seconds. pytest's own limit (`timeout` in pyproject.toml) is for tests that take seconds; a fit
#: that takes 100 s on an idle machine took 600 s beside ten busy processes on two cores.
SLOW_TIMEOUT = 1800

#: Folders and files of the tests that take longest.
LONGEST = {"environments", "ray", "real", "packaging", "test_notebooks.py"}
LONGEST |= {"test_backend_pairs.py", "test_vllm_sampler.py"}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for all tests stays: the collector of cycles does not pass over it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where one of these marks is asked for, a file without its name has no such test."""
    mark = config.option.markexpr
    if mark in ("vllm", "soak") and collection_path.match("test_*.py"):
        return mark not in collection_path.read_text() or None
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what is skipped until ``make soak`` as the soak's, but what has a row there."""
    if in_soak.mark in item.iter_markers("skipif") and not item.get_closest_marker("soak"):
        item.add_marker(pytest.mark.soak)


@pytest.hookimpl(trylast=True)  # of those that are run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests come first, and have a limit that holds on a busy machine unless they set one.

    Begun last, one long test would keep a process busy while the others have nothing left to do.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[bool, ...]:
        grouped = item.get_closest_marker("xdist_group")  # one process runs the whole group
        last, long = "conformance" in item.path.parts, LONGEST & {*item.path.parts}
        return not grouped, bool(grouped and not long), item.path not in slow, last, not long

    items.sort(key=place)
    if not any(item.get_closest_marker("xdist_group") for item in items):
        # pytest-xdist gives each process a part of the list as it stands.
        count = getattr(config, "workerinput", {"workercount": 1})["workercount"]
        parts: list[list[pytest.Item]] = [[] for _ in range(count)]
        files = itertools.groupby(list(items), lambda item: item.path)
        for number, (path, file) in enumerate(files):  # as many slow files each
            (parts[number % count] if path in slow else min(parts, key=len)).extend(file)
        items[:] = itertools.chain.from_iterable(parts)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test's seed is that of its name (`tests.support.seeds`)."""
    seeds.begin(item)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A seed with which a test fails is tried again by the next run."""
    report = yield
    if report.when == "call":
        seeds.end(report.failed)
    return report


@pytest.fixture(autouse=True)
def no_server_named() -> Iterator[None]:
    """A test hands no server and no key to the next one, as a command that it runs here may."""
    before = {name: os.environ.get(name) for name in SERVER}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def art_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server for the tests that need one and leave it as they found it."""
    known = f'[page]\ngpu_rate = 3.6\nlangfuse_project = "{LANGFUSE_PROJECT}"\n'
    settings = f"max_policies = 10000\n{known}"  # each test makes its own
    data = tmp_path_factory.mktemp("server") / "data"
    with ForkedServer(data, settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def rule_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuleServer]:
    """One server whose model follows rules (`tests.support.rule_model`): it says a script."""
    with RuleServer(tmp_path_factory.mktemp("rules") / "data") as server:
        yield server


@pytest.fixture(scope="session")
def faulty_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    """One server whose engines go wrong as a test tells them; healthy between tests."""
    with FaultyServer(tmp_path_factory.mktemp("faulty") / "data") as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL for the tests that need one, if its programs are on this machine."""
    if programs() is None:
        pytest.skip("needs PostgreSQL's initdb and pg_ctl")
    cluster = Postgres()
    yield cluster
    cluster.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'art.sqlite3'}"
    return request.getfixturevalue("postgres").database()


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    from langchain_art_server.storage.store import Store

    opened = Store(database_url)
    yield opened
    opened.close()


@pytest.fixture
def seats_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors of a Ray cluster are in this process, and their node is this machine."""
    from langchain_art_server.backends.ray import engines
    from tests.support.local_actors import LocalActors

    monkeypatch.setattr(LocalActors, "missing", "")
    monkeypatch.setattr(engines, "PlacedActors", LocalActors)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
