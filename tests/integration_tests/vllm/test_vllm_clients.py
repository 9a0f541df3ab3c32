"""vLLM behind our server: the clients that are not ours, and LangChain's own suite of tests.

The engine is the real vLLM, led by the rule's model (`tests.support.rule_model.vllm_engine`).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.client_matrix import PROGRAMS, check_client
from tests.support.live_server import LiveServer, RuleServer
from tests.support.soak import in_soak_alone
from tests.support.standard_suite import (
    FunctionCallingSuite,
    StandardSuite,
    vcr_cassette_dir,
    vcr_config,
)
from tests.support.vllm_engine import vllm_toml, wide_model

__all__ = ["vcr_cassette_dir", "vcr_config"]  # fixtures of the suite
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("vllm-clients"),
]


class VllmRuleServer(RuleServer):
    """The server with vLLM, led by the rule, and a long context."""

    def __init__(self, folder: Path) -> None:
        model = wide_model(folder / "model", max_position_embeddings=16384)
        self.journal = folder / "journal.jsonl"
        LiveServer.__init__(
            self,
            folder / "data",
            *("--config", str(vllm_toml(folder / "vllm.toml"))),
            model=model,
            env={"RULE_JOURNAL": str(self.journal)},
            module="tests.support.rule_model.server",
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmRuleServer]:
    made = VllmRuleServer(tmp_path_factory.mktemp("vllm-rules"))
    try:
        made.start(timeout=600)
        yield made
    finally:
        made.stop()


#: Their requests have the form of others of these.
ALIKE = ("openai-python-2", "chat-openai")


@pytest.mark.parametrize(
    "client", [in_soak_alone(one) if one in ALIKE else one for one in PROGRAMS]
)
def test_a_foreign_client_is_served_captured_and_trained(
    client: str, server: VllmRuleServer
) -> None:
    check_client(client, server)


class TestStandard(StandardSuite):
    """LangChain's suite. What it skips: see `standard_suite`."""


class TestStandardFunctionCalling(FunctionCallingSuite):
    """The same with structured output by tool calls."""


@pytest.fixture(scope="module", autouse=True)
def where(server: VllmRuleServer) -> None:
    TestStandard.url = TestStandardFunctionCalling.url = server.base_url
