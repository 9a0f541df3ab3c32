"""Clients that are not ours: each makes its calls, and its runs are captured and trained."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.agent_frameworks import FRAMEWORKS, check_framework
from tests.support.client_matrix import PROGRAMS, PROXY, check_client
from tests.support.live_server import RuleServer
from tests.support.soak import in_soak_alone

#: A client, and the framework that is the lightest to install. `make test-vllm` runs one client of
#: each kind, `make soak` all.
IN_TEST = ("openai-python-3", "pydantic-ai")


def chosen(names: Iterable[str]) -> list[object]:
    return [one if one in IN_TEST else in_soak_alone(one) for one in names]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", chosen([*PROGRAMS, *PROXY]))
def test_a_foreign_client_is_served_captured_and_trained(
    client: str, rule_server: RuleServer
) -> None:
    check_client(client, rule_server)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", chosen(FRAMEWORKS))
def test_an_agent_of_another_framework_is_served_captured_and_trained(
    framework: str, rule_server: RuleServer, tmp_path: Path
) -> None:
    check_framework(framework, rule_server, tmp_path)
