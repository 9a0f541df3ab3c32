"""The proxy's settings of docs/other-frameworks.md are the tested ones, and its own block trains.

The frameworks' programs import its other blocks: `tests/support/agent_frameworks.py`.
"""

import ast
import itertools
import uuid
from typing import Any

import openai
import pytest
import yaml

from langchain_art.client.sync_client import ArtClient
from tests.support.client_matrix import CLIENTS
from tests.support.live_server import LiveServer
from tests.support.pages import REPO, blocks

BLOCKS = blocks(REPO / "docs" / "other-frameworks.md")
TRAINING, *_ = [block.code for block in BLOCKS if block.language == "python"]


def test_the_proxys_settings_are_those_that_are_tested() -> None:
    tree = ast.parse((CLIENTS / "litellm_proxy.py").read_text())
    function = next(one for one in tree.body if getattr(one, "name", "") == "settings")
    names: dict[str, Any] = {"KEY": "sk-…"}
    exec(compile(ast.Module([function], []), "litellm_proxy.py", "exec"), names)
    [shown] = [block.code for block in BLOCKS if block.language == "yaml"]
    assert yaml.safe_load(shown) == names["settings"]("http://127.0.0.1:8000/v1")


def test_the_block_that_trains_trains(
    art_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = f"framework-{uuid.uuid4().hex[:8]}"
    rewards = itertools.cycle([True, False])

    def answer(base_url: str, run: str, question: str, tools: list[Any]) -> str:
        client = openai.OpenAI(base_url=base_url, api_key="none")
        messages: Any = [{"role": "user", "content": question}]
        headers = {"x-art-trajectory-id": run, "x-art-node": "agent"}
        said = client.chat.completions.create(
            model=policy, messages=messages, max_tokens=4, extra_headers=headers
        )
        return said.choices[0].message.content or ""

    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    with ArtClient(art_server.base_url) as client:
        client.create_policy(policy)
    names: dict[str, Any] = {"answer": answer, "right": lambda question, said: next(rewards)}
    exec(compile(TRAINING, "other-frameworks.md", "exec"), names)
    result = names["train_step"](policy, ["When?", "Where?"], [])
    assert (result.version, result.metrics["calls_trained"]) == (1, 8)
