"""The code of docs/other-frameworks.md is that of the tested programs, and its own block trains."""

import ast
import itertools
import uuid
from typing import Any

import openai
import pytest
import yaml

from langchain_art.client.sync_client import ArtClient
from tests.support.agent_frameworks import FRAMEWORKS, PROGRAMS
from tests.support.client_matrix import CLIENTS
from tests.support.live_server import LiveServer
from tests.support.pages import REPO, blocks

BLOCKS = blocks(REPO / "docs" / "other-frameworks.md")
TRAINING, *TAKEN = [block.code for block in BLOCKS if block.language == "python"]


def parts(code: str) -> set[str]:
    """What a program imports, one name each, and its functions as they stand."""
    found: set[str] = set()
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import):
            found |= {f"import {one.name}" for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"from {node.module} import {one.name}" for one in node.names}
        elif isinstance(node, ast.FunctionDef):
            found.add(ast.get_source_segment(code, node) or "")
    return found


def test_each_program_is_shown_as_it_is_tested() -> None:
    left = [parts(code) for code in TAKEN]
    for name, framework in FRAMEWORKS.items():
        program = parts((PROGRAMS / framework.program).read_text())
        shown = [block for block in left if block <= program]
        assert len(shown) == 1, f"{name}: got {len(shown)} blocks of its code, expected one"
        assert any(part.startswith("def answer(") for part in shown[0])
        left.remove(shown[0])
    assert left == []


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
