"""Every topology in every mode keeps the five promises (`checks`), and the docs say so.

``make test`` runs each in one mode, the next one in the next; ``make soak`` runs all.
"""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pkgutil import iter_modules

import pytest

from langchain_art.client.sync_client import ArtClient
from tests.conformance.suite import cases, checks
from tests.conformance.suite.cases import load_cases
from tests.conformance.suite.harness import TOPOLOGIES, Mode, Topology
from tests.conformance.suite.performance import perform
from tests.conformance.topologies import table
from tests.conformance.topologies.journal import JournalWitness, served_by
from tests.conformance.topologies.rows import each_token_once
from tests.support.live_server import REPO, RuleServer
from tests.support.soak import count

load_cases()
importlib.import_module(f"{__package__}.cases_remote")

ALL = [(case, mode) for case in TOPOLOGIES.values() for mode in case.modes]
#: Each topology in one of its modes, by its number.
PART = [
    (case, case.modes[number % len(case.modes)]) for number, case in enumerate(TOPOLOGIES.values())
]
REST = [pair for pair in ALL if pair not in PART]
LAST = {case.name: mode for case, mode in PART}
"""The mode in which it is also trained."""


@pytest.fixture(scope="session")
def client(rule_server: RuleServer) -> Iterator[ArtClient]:
    with ArtClient(rule_server.base_url) as client:
        client.create_policy("rival")
        yield client


@pytest.fixture(scope="session")
def witness(rule_server: RuleServer) -> JournalWitness:
    return JournalWitness(rule_server)


@pytest.fixture
def prove(
    rule_server: RuleServer, client: ArtClient, witness: JournalWitness
) -> Callable[[Topology, Mode], None]:
    """Runs a topology in one mode, and checks every promise."""
    served = served_by(rule_server)

    def run_and_check(case: Topology, mode: Mode) -> None:
        run = perform(case, mode, served, witness, client, number=1)
        checks.captured(run)
        checks.exact_tokens(run)
        rows = each_token_once(run)
        assert checks.audited(run, rule_server.policy).rows == len(rows)
        checks.judged(run)
        if mode == LAST[case.name]:
            other = perform(case, mode, served, witness, client)
            checks.trained(other, run, rule_server.policy)

    return run_and_check


@pytest.mark.parametrize(
    ("case", "mode"), [pytest.param(case, mode, id=f"{case.name}-{mode}") for case, mode in PART]
)
def test_topology(case: Topology, mode: Mode, prove: Callable[[Topology, Mode], None]) -> None:
    prove(case, mode)


@pytest.mark.soak("C1", len(REST), "topologies in a further mode")
@pytest.mark.timeout(count(300, 3600))
def test_the_other_modes(prove: Callable[[Topology, Mode], None]) -> None:
    for case, mode in REST[: count(1, len(REST))]:
        prove(case, mode)


def test_the_order_of_topologies_is_not_that_of_imports() -> None:
    here, last = cases.__name__, max(module.name for module in iter_modules(cases.__path__))
    program = (
        f"import {here}.{last}; from {here} import load_cases; load_cases();"
        f"from {Topology.__module__} import TOPOLOGIES;"
        "print([(name, case.program.__module__) for name, case in TOPOLOGIES.items()])"
    )
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=REPO, check=True)
    of_cases = [(n, one.program.__module__) for n, one in TOPOLOGIES.items()]
    assert ast.literal_eval(done.stdout) == [one for one in of_cases if here in one[1]]


def test_the_page_is_of_this_suite() -> None:
    command = "write it anew with python -m tests.conformance.topologies"
    assert table.PAGE.read_text() == table.page(), command
    quoted = {
        (page.name, count)
        for page in (REPO / "README.md", REPO / "CHANGELOG.md", *(REPO / "docs").glob("*.md"))
        for count in re.findall(r"(\d+) topologies", page.read_text())
    }
    assert len(quoted) >= 4 and {count for _, count in quoted} == {str(len(TOPOLOGIES))}, quoted
