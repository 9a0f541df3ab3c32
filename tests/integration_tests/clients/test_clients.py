"""Clients that are not ours: each makes its calls, and its runs are captured and trained."""

from __future__ import annotations

import pytest

from tests.support.client_matrix import PROGRAMS, check_client
from tests.support.live_server import RuleServer


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", list(PROGRAMS))
def test_a_foreign_client_is_served_captured_and_trained(
    client: str, rule_server: RuleServer
) -> None:
    check_client(client, rule_server)
