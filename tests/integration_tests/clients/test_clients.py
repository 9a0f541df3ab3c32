"""Clients that are not ours: each makes its calls, and its runs are captured and trained."""

import pytest

from tests.support.agent_frameworks import FRAMEWORKS, check_framework
from tests.support.client_matrix import PROGRAMS, PROXY, check_client
from tests.support.live_server import RuleServer
from tests.support.soak import count


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", [*PROGRAMS, *list(PROXY)[: count(0, 1)]])
def test_a_foreign_client_is_served_captured_and_trained(
    client: str, rule_server: RuleServer
) -> None:
    check_client(client, rule_server)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", list(FRAMEWORKS)[: count(2, len(FRAMEWORKS))])
def test_an_agent_of_another_framework_is_served_captured_and_trained(
    framework: str, rule_server: RuleServer
) -> None:
    check_framework(framework, rule_server)
