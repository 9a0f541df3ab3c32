"""Every family that the docs name, through sampling, tool calls, training and swaps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from langchain_art_server.backends.peft_engine import PeftEngine
from tests.conformance.families import FAMILIES, LORA, Outcome, go_through, page, save_family
from tests.live_server import REPO

PAGE = REPO / "docs" / "models.md"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return {name: go_through(name, tmp_path_factory.mktemp("family")) for name in FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_sampled_is_what_is_trained(family: str, outcomes: dict[str, Outcome]) -> None:
    one = outcomes[family]
    assert max(one.gaps) <= 1e-4  # also after each swap: a version that was not loaded is far off
    assert one.moved > 0.01
    assert one.base_stayed
    assert one.tool_calls == 2
    assert {"o_proj"} <= set(one.targets)


@pytest.mark.slow
def test_plain_attention_is_a_forest(outcomes: dict[str, Outcome]) -> None:
    padded = {name for name, one in outcomes.items() if one.forest is not None}
    assert padded == {"Mistral, sliding window", "Gemma 3", "DeepSeek V3, Kimi K2"}


@pytest.mark.slow
def test_the_page_says_what_was_seen(outcomes: dict[str, Outcome]) -> None:
    """With UPDATE_DOCS=1 it is written."""
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(page(outcomes))
    assert PAGE.read_text() == page(outcomes)


def test_layers_that_peft_takes_for_experts_are_no_targets(tmp_path: Path) -> None:
    model = save_family("DeepSeek V3, Kimi K2", tmp_path / "model")
    engine = PeftEngine(str(model), "cpu")
    (tmp_path / "v0").mkdir()
    engine.init_adapter(tmp_path / "v0", LORA)
    assert engine.parameters
    assert not [name for name in engine.parameters if "experts" in name or ".mlp." in name]
