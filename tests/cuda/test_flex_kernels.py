"""What FlexAttention is asked for on CUDA, and how often it compiles. No kernel runs."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as flex

from langchain_art.errors import ArtError
from langchain_art_server.algorithms.sequences.prefix_forest import grow
from langchain_art_server.backends.peft.forest import attention_flex

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
