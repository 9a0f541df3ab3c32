"""Who asks the shared server, and what the rooms that read Langfuse share."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from langchain_art.client.sync_client import ArtClient
from tests.support.live_server import LiveServer
from tests.support.reviewed_runs import langfuse, make_runs, own_policy, review

__all__ = ["langfuse", "make_runs", "own_policy", "review"]  # fixtures


@pytest.fixture(scope="module")
def http(art_server: LiveServer) -> Iterator[httpx.Client]:
    with art_server.http() as client:
        yield client


@pytest.fixture(scope="module")
def client(art_server: LiveServer) -> Iterator[ArtClient]:
    with ArtClient(art_server.base_url) as made:
        yield made


@pytest.fixture(scope="module")
def sdk(art_server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=art_server.base_url, api_key="none", max_retries=0)
