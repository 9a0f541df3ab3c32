"""Every topology in every mode keeps the five promises (`checks`), and the docs say so.

``make test`` runs each in one mode, the next one in the next, and trains some of each kind
(`TRAINED`); ``make soak`` runs all, and trains each in one mode.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langgraph.pregel.remote import RemoteGraph

from langchain_art import capture
from langchain_art.client.sync_client import ArtClient
from tests.conformance.suite import checks
from tests.conformance.suite.cases import load_cases
from tests.conformance.suite.harness import TOPOLOGIES, Kit, Mode, Topology
from tests.conformance.suite.performance import perform
from tests.conformance.topologies import table
from tests.conformance.topologies.cases_remote import deployment
from tests.conformance.topologies.journal import JournalWitness, each_token_once, served_by
from tests.support.live_server import REPO, RuleServer
from tests.support.soak import count, share

load_cases()

ALL = [(case, mode) for case in TOPOLOGIES.values() for mode in case.modes]
#: Each topology in one of its modes, by its number.
PART = [
    (case, case.modes[number % len(case.modes)]) for number, case in enumerate(TOPOLOGIES.values())
]
REST = [pair for pair in ALL if pair not in PART]
LAST = {
    case.name: case.modes[(number + (number % 3 != 1)) % len(case.modes)]
    for number, case in enumerate(TOPOLOGIES.values())
}
"""Where it is trained in ``make soak``: two in three in a mode that no `test_topology` runs."""
KINDS = (lambda case: case.program.__module__, lambda case: frozenset(case.excluded))
TRAINED = {
    case.name
    for kind in KINDS
    for case in {kind(case): case for case in reversed(TOPOLOGIES.values())}.values()
    if "deep agent" not in case.name  # whose prompts have 7,000 tokens
}
"""In ``make test``: the first of each module, and of each set of reasons why calls are left out."""


def learns(case: Topology, mode: Mode) -> bool:
    """Whether it is trained in this mode."""
    return mode == LAST[case.name] if share() else case.name in TRAINED


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
        if learns(case, mode):
            other = perform(case, mode, served, witness, client)
            checks.trained(other, run, rule_server.policy)

    return run_and_check


@pytest.mark.parametrize(
    ("case", "mode"), [pytest.param(case, mode, id=f"{case.name}-{mode}") for case, mode in PART]
)
def test_topology(case: Topology, mode: Mode, prove: Callable[[Topology, Mode], None]) -> None:
    prove(case, mode)


# Here, since LangGraph's server has just been started for the topologies above.
def test_a_remote_graph_that_no_scope_hears(
    rule_server: RuleServer, caplog: pytest.LogCaptureFixture
) -> None:
    kit = Kit(served_by(rule_server), "invoke", 1)
    agent = RemoteGraph("agent", url=deployment(kit.served.base_url))
    with capture() as run:
        state: Any = agent.invoke(kit.ask("hello"))
        run.output = state
    assert "RemoteGraph" in caplog.text
    trajectory = run.trajectory()
    assert trajectory.turns == ()
    assert "art_trajectory_id" in trajectory.metadata["not_heard"][0]
    said = state["messages"][-1]["response_metadata"]["call_id"]
    assert trajectory.metadata["sampled_elsewhere"] == [said]


@pytest.mark.soak("C1", len(REST), "topologies in a further mode")
@pytest.mark.timeout(count(300, 3600))
def test_the_other_modes(prove: Callable[[Topology, Mode], None]) -> None:
    for case, mode in REST[: count(1, len(REST))]:
        prove(case, mode)


def test_the_page_is_of_this_suite() -> None:
    """Its table and the programs that it shows; its count, and that of other pages."""
    command = "write it anew with python -m tests.conformance.topologies"
    assert (page := table.PAGE.read_text()) == table.page(), command
    for name in ("create_agent with tools", "RetryPolicy around a chain"):
        assert inspect.getsource(TOPOLOGIES[name].program) in page
    quoted = {
        (page.name, count)
        for page in (REPO / "README.md", REPO / "CHANGELOG.md", *(REPO / "docs").glob("*.md"))
        for count in re.findall(r"(\d+) topologies", page.read_text())
    }
    assert len(quoted) >= 4 and {count for _, count in quoted} == {str(len(TOPOLOGIES))}, quoted
