"""LangChain's own integration tests of a chat model, against our server and its rule's model."""

import os
from collections.abc import Iterator

import pytest

from tests.support.standard_suite import (
    FunctionCallingSuite,
    StandardSuite,
    vcr_cassette_dir,
    vcr_config,
)

__all__ = ["vcr_cassette_dir", "vcr_config"]  # fixtures of the suite


@pytest.fixture(scope="module", autouse=True)
def where(request: pytest.FixtureRequest) -> Iterator[None]:
    """The session's server, or (under other releases of LangChain) that of ART_TEST_URL."""
    url = os.environ.get("ART_TEST_URL") or request.getfixturevalue("rule_server").base_url
    TestChatART.url = TestFunctionCalling.url = url
    yield


class TestChatART(StandardSuite):
    """Structured output by JSON schema."""


class TestFunctionCalling(FunctionCallingSuite):
    """Structured output by tool calls."""
