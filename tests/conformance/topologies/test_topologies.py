"""Every topology in every mode keeps the five promises (`checks`), and the docs say so."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from langchain_art.client.sync_client import ArtClient
from tests.conformance.topologies import checks, table
from tests.conformance.topologies.harness import TOPOLOGIES, Mode, Topology, perform
from tests.support.live_server import RuleServer

for cases in sorted(Path(__file__).parent.glob("cases_*.py")):
    importlib.import_module(f"{__package__}.{cases.stem}")


@pytest.fixture(scope="session")
def client(rule_server: RuleServer) -> Iterator[ArtClient]:
    with ArtClient(rule_server.base_url) as client:
        client.create_policy("rival")
        yield client


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
    record_property: Callable[[str, object], None],
) -> None:
    run = perform(case, mode, rule_server, client, number=1)
    checks.captured(run)
    record_property("proved", (case.name, "captured"))
    checks.exact_tokens(run)
    record_property("proved", (case.name, "exact tokens"))
    checks.each_token_once(run)
    checks.audited(run, rule_server.policy)
    record_property("proved", (case.name, "each token once"))
    checks.judged(run)
    record_property("proved", (case.name, "judged"))
    if mode == case.modes[-1]:
        checks.trained(perform(case, mode, rule_server, client), run, rule_server.policy)
        record_property("proved", (case.name, "trained"))


def test_the_page_is_of_this_suite() -> None:
    command = "write it anew with python -m tests.conformance.topologies"
    assert table.PAGE.read_text() == table.page(table.all_proved()), command
