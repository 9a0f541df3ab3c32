"""Which kernel FlexAttention takes on CUDA for the parts of a forest, and how often it compiles.

No GPU: Inductor's lowering for CPUs is replaced by the decisions of the one for CUDA, which are
torch's own functions, with the properties of a device given. No kernel is compiled or run.
"""

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.choices as choices
import torch._inductor.kernel.flex.flex_attention as lowering
import torch._inductor.kernel.flex.flex_decoding as decoding
import torch.nn.attention.flex_attention as flex
from torch._inductor.exc import InductorError
from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic

from langchain_art.errors import ArtError
from langchain_art_server.algorithms.sequences.prefix_forest import grow
from langchain_art_server.backends.peft.forest import attention_flex
from tests.support.soak import in_soak_alone

WIDTH = 128


class Chosen(Exception):
    """The kernel that was chosen; ends the lowering."""


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


@pytest.fixture
def cuda_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowering decides as on an H100, says what it chose and ends."""
    card = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: card)
    monkeypatch.setattr(
        choices.InductorChoices,
        "get_flex_decode_configs",
        lambda _self, width, dtype, _device="cuda": CUDAConfigHeuristic().get_flex_decode_configs(
            width, dtype
        ),
    )

    def append(*_args: Any, **options: Any) -> None:
        raise Chosen(f"flex_decoding, BLOCK_M={options['BLOCK_M']}")

    monkeypatch.setattr(decoding.flex_decoding_template, "maybe_append_choice", append)

    def decide(
        query: Any,
        key: Any,
        value: Any,
        _subgraph: Any,
        block_mask: Any,
        scale: Any,
        kernel_options: dict[str, Any],
        score_buffers: Any,
        mask_buffers: Any,
    ) -> None:
        backend = kernel_options.get("BACKEND", "AUTO")
        options = {k: v for k, v in kernel_options.items() if k != "BACKEND"}
        # As in torch._inductor.kernel.flex.flex_attention of torch 2.13.
        small = decoding._use_flex_decoding(query, block_mask[3], value, options, True)
        if backend == "TRITON" or not small:
            raise Chosen("flex_attention")
        decoding.create_flex_decoding_kernel(
            query, key, value, block_mask, scale, options, None, None, score_buffers, mask_buffers
        )

    monkeypatch.setattr(lowering, "lower_cpu", decide)


#: All that are shorter than 256 tokens are padded to as many.
@pytest.mark.parametrize(
    ("ratio", "tokens"),
    [
        (5, 100),
        *(in_soak_alone(*one) for one in ((1, 7), (2, 33), (4, 63), (7, 63), (8, 7), (8, 300))),
    ],
)
@pytest.mark.usefixtures("as_on_cuda", "cuda_choices")
def test_every_length_of_a_part_has_a_kernel(ratio: int, tokens: int) -> None:
    with pytest.raises(InductorError, match="Chosen: flex"):
        attend(heads=2 * ratio, keys=2, new=tokens, grad=False)


@pytest.mark.parametrize("new", [300, 384])
def test_the_kernel_keeps_what_was_laid_and_no_copy(
    new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.Tensor] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, *_values: Any, **_options: Any) -> torch.Tensor:
        given.extend((q, k))
        return q

    monkeypatch.setattr(attention_flex, "flex_attention", kernel)
    part = chain(new)
    laid = [part.lay(torch.zeros(1, new, 2, WIDTH).transpose(1, 2)) for _ in range(2)]
    part.attend(*laid, torch.zeros(1, 2, new, WIDTH), 0.25)
    assert [one.data_ptr() for one in given] == [one.data_ptr() for one in laid]


#: New tokens, tokens above and whether a backward pass follows, in the order in which a learner
#: meets them: the forest check, the measurement of activations, steps, logprobs.
SEQUENCE = [
    *((2, 3, False), (4, 3, False), (4, 0, False), (3, 1, False), (1, 4, False), (300, 0, True)),
    (63, 0, True),
    *((4000, 0, True), (900, 4000, True), (300, 4000, True), (60, 130, True), (1, 4000, True)),
    *((128, 0, True), (127, 1, True), (1, 128, True), (129, 1, True), (256, 256, True)),
    *((4096, 0, False), (900, 4000, False), (100, 30, False), (129, 1, False)),
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
