"""The forest check refuses an attention that ignores the forest, as models with kernels have."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from langchain_art_server.backends.peft import packer
from langchain_art_server.backends.peft.forest.packing import (
    FOREST_ATTENTION,
    ForestPass,
    forest_attention,
)
from langchain_art_server.backends.peft.logprob_scoring import Scorer


@pytest.fixture
def scorer() -> Scorer:
    """A random model of width 64 in bfloat16, on which a wrong attention changes little."""
    return scorer_of(3)


def scorer_of(layers: int) -> Scorer:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=layers,
        vocab_size=512,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    base = Qwen3ForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    made = Scorer(base)
    made.plain_head = packer.has_plain_head(base)
    return made


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    yield
    AttentionInterface.register(FOREST_ATTENTION, forest_attention)


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: Any) -> torch.Tensor:
    k, v = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, k, v, is_causal=True, scale=scale).transpose(1, 2)


def ignores(
    _module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Plain causal attention, as that of a library which swallows options that it does not know."""
    return causal(query, key, value, scaling), None


def pretends(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    _mask: Any,
    scaling: Any = None,
    forest: ForestPass | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The same, and takes note of its layer: only numbers tell."""
    assert forest is not None
    forest.ran[module.layer_idx] = None
    if forest.kept is not None:
        forest.kept.setdefault(module.layer_idx, (key[0], value[0]))
    return causal(query, key, value, scaling), None


def halves(module: Any, query: Any, key: Any, value: Any, mask: Any, **rest: Any) -> Any:
    """Right forward, and half of the values' gradient on the way back."""
    value = value.detach() + 0.5 * (value - value.detach())
    return forest_attention(module, query, key, value, mask, **rest)


def only_some(module: Any, *args: Any, **options: Any) -> Any:
    """In the second of the layers another one."""
    return (ignores if module.layer_idx == 1 else forest_attention)(module, *args, **options)


def test_the_right_attention_passes_in_short_and_long_rows(scorer: Scorer) -> None:
    before = scorer.base.config._attn_implementation
    for rows, budget in ((packer.ROWS, 8), (packer.LONG_ROWS, 320)):
        assert packer.difference(scorer, rows, budget) is None
        assert scorer.base.config._attn_implementation == before
    assert sum(map(len, packer.LONG_ROWS)) > 2 * 256
    assert packer.use_forest(scorer) is None
    assert scorer.base.config._attn_implementation == FOREST_ATTENTION


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (ignores, "ran in 0 of 3 layers"),
        (only_some, "ran in 2 of 3 layers"),
        (pretends, "logprobs differ"),
        (halves, "gradients"),
    ],
)
def test_a_wrong_attention_is_refused(attention: Any, why: str, scorer: Scorer) -> None:
    AttentionInterface.register(FOREST_ATTENTION, attention)
    found = packer.use_forest(scorer)
    assert found is not None and why in found
    assert scorer.base.config._attn_implementation == "sdpa"


def test_rounding_of_many_layers_is_not_taken_for_a_wrong_attention() -> None:
    """On an H200, Qwen3-8B's shape (36 layers of width 4096) was 0.0658 away, and refused."""
    scorer = scorer_of(36)
    assert packer.gradient_bound(scorer.base) > 2 * 0.0658
    assert packer.use_forest(scorer) is None
    scorer.base.set_attn_implementation("sdpa")
    for attention, why in ((pretends, "logprobs differ"), (halves, "gradients")):
        AttentionInterface.register(FOREST_ATTENTION, attention)
        assert why in str(packer.use_forest(scorer))


def test_both_comparisons_are_made_one_after_the_other_as_on_a_gpu(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "BY_BLOCKS", {"cpu"})
    compared: list[int] = []
    difference = packer.difference

    def noted(scorer: Scorer, offsets: Any, budget: int) -> str | None:
        compared.append(budget)
        return difference(scorer, offsets, budget)

    monkeypatch.setattr(packer, "difference", noted)
    assert packer.use_forest(scorer) is None
    assert compared == [8, 320]


@pytest.mark.parametrize("attention", [pretends, halves])
def test_rows_of_several_blocks_show_it_as_well(attention: Any, scorer: Scorer) -> None:
    AttentionInterface.register(FOREST_ATTENTION, attention)
    found = packer.difference(scorer, packer.LONG_ROWS, budget=320)
    assert found is not None and "gradients differ" in found
