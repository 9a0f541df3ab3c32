"""Every topology in every mode keeps the five promises (`checks`), and the docs say so."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator

import pytest

from langchain_art.client.sync_client import ArtClient
from tests.conformance.suite import checks
from tests.conformance.suite.cases import load_cases
from tests.conformance.suite.harness import TOPOLOGIES, Mode, Topology
from tests.conformance.suite.performance import perform
from tests.conformance.topologies import table
from tests.conformance.topologies.journal import JournalWitness, served_by
from tests.conformance.topologies.rows import each_token_once
from tests.support.live_server import REPO, RuleServer

load_cases()
importlib.import_module(f"{__package__}.cases_remote")


@pytest.fixture(scope="session")
def client(rule_server: RuleServer) -> Iterator[ArtClient]:
    with ArtClient(rule_server.base_url) as client:
        client.create_policy("rival")
        yield client


@pytest.fixture(scope="session")
def witness(rule_server: RuleServer) -> JournalWitness:
    return JournalWitness(rule_server)


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(case, mode, id=f"{case.name}-{mode}")
        for case in TOPOLOGIES.values()
        for mode in case.modes
    ],
)
def test_topology(
    case: Topology,
    mode: Mode,
    rule_server: RuleServer,
    client: ArtClient,
    witness: JournalWitness,
    record_property: Callable[[str, object], None],
) -> None:
    served = served_by(rule_server)
    run = perform(case, mode, served, witness, client, number=1)
    checks.captured(run)
    record_property("proved", (case.name, "captured"))
    checks.exact_tokens(run)
    record_property("proved", (case.name, "exact tokens"))
    rows = each_token_once(run)
    checks.audited(run, rule_server.policy)
    assert client.audit(run.trajectory.id, rule_server.policy).rows == len(rows)
    record_property("proved", (case.name, "each token once"))
    checks.judged(run)
    record_property("proved", (case.name, "judged"))
    if mode == case.modes[-1]:
        other = perform(case, mode, served, witness, client)
        checks.trained(other, run, rule_server.policy)
        record_property("proved", (case.name, "trained"))


def test_the_page_is_of_this_suite() -> None:
    command = "write it anew with python -m tests.conformance.topologies"
    assert table.PAGE.read_text() == table.page(table.all_proved()), command
    quoted = {
        (page.name, count)
        for page in (REPO / "README.md", REPO / "CHANGELOG.md", *(REPO / "docs").glob("*.md"))
        for count in re.findall(r"(\d+) topologies", page.read_text())
    }
    assert len(quoted) >= 4 and {count for _, count in quoted} == {str(len(TOPOLOGIES))}, quoted
