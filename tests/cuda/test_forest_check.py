"""The forest on CUDA: its check refuses an attention that ignores it, as models with kernels have.

And what FlexAttention is asked for, and how often it compiles. No kernel runs.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as flex
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from langchain_art.errors import ArtError
from langchain_art_server.algorithms.sequences.prefix_forest import grow
from langchain_art_server.backends.peft import packer
from langchain_art_server.backends.peft.forest import attention_flex
from langchain_art_server.backends.peft.forest.packing import (
    FOREST_ATTENTION,
    forest_attention,
)
from langchain_art_server.backends.peft.logprob_scoring import Scorer


def scorer_of(layers: int) -> Scorer:
    """A random model of width 64 in bfloat16, on which a wrong attention changes little."""
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


@pytest.fixture
def scorer() -> Scorer:
    return scorer_of(3)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    yield
    AttentionInterface.register(FOREST_ATTENTION, forest_attention)


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: Any) -> torch.Tensor:
    k, v = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, k, v, is_causal=True, scale=scale).transpose(1, 2)


def ignores(
    _module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Plain causal attention, as that of a library which swallows options that it does not know."""
    return causal(query, key, value, scaling), None


def pretends(
    module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: Any, forest: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """The same, and takes note of its layer: only numbers tell."""
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
    scorer.base.set_attn_implementation("sdpa")
    for attention in (pretends, halves):  # rows of several blocks show it as well
        AttentionInterface.register(FOREST_ATTENTION, attention)
        assert "gradients differ" in str(difference(scorer, packer.LONG_ROWS, 320))


WIDTH = 128


def chain(new: int, above: int = 0) -> attention_flex.Blocks:
    """A part of `new` tokens, one after the other, below `above` others."""
    total = new + above
    return attention_flex.Blocks(
        np.arange(above, total),
        np.arange(above),
        grow([range(total)]),
        torch.device("cpu"),
    )


def attend(heads: int, keys: int, new: int, above: int = 0, *, grad: bool = True) -> torch.Tensor:
    def made(count: int, tokens: int) -> torch.Tensor:
        shape = (1, tokens, count, WIDTH)
        return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=grad).transpose(1, 2)

    q, k, v = made(heads, new), made(keys, new), made(keys, new)
    if above:
        k, v = (torch.cat([made(keys, above), one], 2) for one in (k, v))
    with torch.set_grad_enabled(grad):
        return chain(new, above).attend(q, k, v, 0.25)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`Blocks.attend` compiles as for CUDA, whatever the device of its tensors."""
    torch._dynamo.reset()
    compiled = attention_flex.compiled_attention()
    monkeypatch.setattr(flex, "_validate_device", lambda *_args, **_options: None)
    monkeypatch.setattr(attention_flex, "flex_attention", compiled)
    yield
    torch._dynamo.reset()
    attention_flex.compiled_attention.cache_clear()


def test_the_kernel_for_many_queries_gets_what_was_laid_and_no_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = 300
    given: list[torch.Tensor] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, *_values: Any, **options: Any) -> torch.Tensor:
        given.extend((q, k))
        # The kernel for few queries does not exist for most ratios of heads to key heads.
        assert options["kernel_options"]["BACKEND"] == "TRITON"
        return q

    monkeypatch.setattr(attention_flex, "flex_attention", kernel)
    part = chain(new)
    laid = [part.lay(torch.zeros(1, new, 2, WIDTH).transpose(1, 2)) for _ in range(2)]
    part.attend(*laid, torch.zeros(1, 2, new, WIDTH), 0.25)
    assert [one.data_ptr() for one in given] == [one.data_ptr() for one in laid]


#: New tokens, tokens above and whether a backward pass follows, in the order in which a learner
#: meets them: the forest check, the measurement of activations, steps, logprobs.
SEQUENCE = [
    *((2, 3, False), (4, 0, False), (1, 4, False), (300, 0, True), (63, 0, True)),
    *((4000, 0, True), (900, 4000, True), (60, 130, True), (1, 4000, True), (128, 0, True)),
    *((129, 1, True), (256, 256, True), (4096, 0, False), (900, 4000, False), (129, 1, False)),
]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The graphs that are compiled; in their place run copies of the queries."""
    found: list[int] = []

    def backend(_graph: Any, _inputs: Any) -> Callable[..., Any]:
        found.append(len(found))

        def run(*inputs: Any) -> tuple[torch.Tensor]:
            wide = [x for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 4]
            return (next(x for x in wide if x.is_floating_point()) * 1.0,)

        return run

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return found


@pytest.mark.usefixtures("graphs", "as_on_cuda")
def test_all_lengths_share_few_compiled_graphs(graphs: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*torch.compile")
        for new, above, grad in SEQUENCE:
            out = attend(4, 2, new, above, grad=grad)
            assert out.shape == (1, new, 4, WIDTH)
    assert 0 < len(graphs) <= 4


@pytest.mark.usefixtures("graphs", "as_on_cuda")
def test_a_graph_too_many_is_an_error_and_no_attention_over_all_pairs() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        attend(4, 2, 300, grad=True)
        with pytest.raises(ArtError, match="compiled for more shapes"):
            attend(4, 2, 300, grad=False)
