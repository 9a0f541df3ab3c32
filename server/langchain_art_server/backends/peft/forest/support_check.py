"""Test of a model's support of token forests: its config, and a comparison with padded rows.

Compared are logprobs and, for the backward pass, the gradient by a vector that is added to all
embeddings. `ForestPass` sees to it that the attention ran in every layer.

Child side only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from langchain_art.wire.policies import logprob_tolerance
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.models.base_weights import growing_rope
from langchain_art_server.backends.peft.forest.packing import (
    FOREST_ATTENTION,
    ForestRows,
    OddAttentionError,
)
from langchain_art_server.backends.peft.logprob_scoring import (
    CountedTokens,
    Packing,
    PaddedRows,
    Scorer,
    number_dtype,
)

log = logging.getLogger(__name__)
#: Most difference of the two gradients over their size, in a dtype of 32 bits or more.
GRADIENT_GAP = 1e-3
#: The same in 16 bits with three layers. Measured in bfloat16 there: 0.005 to 0.011 where the
#: attention is right, 0.17 to 0.57 where it ignores forests.
HALF_GAP = 0.05
#: Rows that share beginnings, as offsets from an arbitrary token; compared in parts of 8 tokens.
ROWS = [
    *([1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 9, 4, 4], [1, 3, 2, 5, 8], [6, 2, 1, 9])
]
#: Devices whose kernels take tokens by blocks of 128.
BY_BLOCKS = {"cuda"}
#: Longer ones, for these: blocks with all pairs, some and none.
LONG_ROWS = [[*range(1, 301), *range(end, end + 150)] for end in (7, 8)]


def has_plain_head(base: PreTrainedModel) -> bool:
    """True if the output head alone makes the logits (no scaling or soft-capping behind it)."""
    scorer = Scorer(base)
    ids = torch.arange(1, 5, device=base.device)
    seen: list[torch.Tensor] = []
    hook = scorer.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        try:
            logits = base(input_ids=ids[None], use_cache=False).logits
        finally:
            hook.remove()
        return len(seen) == 1 and torch.allclose(scorer.head(seen[0]).float(), logits.float())


def use_forest(scorer: Scorer) -> str | None:
    """Set the model up for forests if its attention supports them; else why not, unchanged."""
    base = scorer.base
    why = excluded_by_config(base)
    if why is None and base.device.type not in ("cpu", "cuda"):
        why = f"there is no forest attention for {base.device.type}"
    if why is None:
        try:
            for offsets, budget in compared_rows(base):
                if (why := difference(scorer, offsets, budget)) is not None:
                    break
        except torch.OutOfMemoryError:
            raise  # not a property of the model
        except (OddAttentionError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            log.debug("The forest does not fit the model.", exc_info=True)
            why = str(error) or type(error).__name__
    if why is None:
        base.set_attn_implementation(FOREST_ATTENTION)
    return why


def compared_rows(base: PreTrainedModel) -> list[tuple[list[list[int]], int]]:
    """The rows that are compared on a model's device, and most tokens of a part of a forest."""
    longest = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    long = ([row[:longest] for row in LONG_ROWS], 320)
    return [(ROWS, 8), *([long] if base.device.type in BY_BLOCKS else [])]


def difference(scorer: Scorer, offsets: Sequence[Sequence[int]], budget: int) -> str | None:
    """Difference of rows as a forest from padded rows beyond rounding; None: there is none.

    Leaves the model with the attention that it had, by which padded rows are computed.

    Raises:
        OddAttentionError: the model does not run that attention, or asks more of it.
    """
    base = scorer.base
    before: Any = getattr(base.config, "_attn_implementation")  # noqa: B009 - its only name

    def forest(rows: Sequence[Row], counted: CountedTokens, _scorer: Scorer) -> Packing:
        base.set_attn_implementation(FOREST_ATTENTION)
        return ForestRows(rows, counted, budget, float("inf"), base)

    try:
        return gap_of(scorer, offsets, forest)
    finally:
        base.set_attn_implementation(before)


def gradient_bound(base: PreTrainedModel) -> float:
    """Most difference of two gradients over their size that rounding explains.

    In 16 bits each layer adds rounding errors of its own, so that it grows by the root of their
    number.
    """
    if base.dtype not in (torch.bfloat16, torch.float16):
        return GRADIENT_GAP
    return HALF_GAP * math.sqrt(max(1.0, base.config.get_text_config().num_hidden_layers / 3))


def gap_of(
    scorer: Scorer,
    offsets: Sequence[Sequence[int]],
    lay_out: Callable[[Sequence[Row], CountedTokens, Scorer], Packing],
) -> str | None:
    """Difference of rows laid out so from padded rows beyond rounding; None: there is none."""
    base, vocabulary = scorer.base, scorer.base.config.get_text_config().vocab_size
    rows = [_row(one, vocabulary) for one in offsets]
    counted = CountedTokens.of(rows)
    expected_T, expected_H = _both_passes(PaddedRows(rows, counted, base), scorer, counted)
    found_T, found_H = _both_passes(lay_out(rows, counted, scorer), scorer, counted)
    gap = (found_T - expected_T).abs().mean().item()
    if not gap <= logprob_tolerance(str(base.dtype).removeprefix("torch.")):
        return f"its logprobs differ by {gap:.3g} nats on average"
    gap = ((found_H - expected_H).norm() / expected_H.norm()).item()
    if not gap <= gradient_bound(base):
        return f"its gradients differ by {gap:.3g} of their size"
    return None


def _both_passes(
    packing: Packing, scorer: Scorer, counted: CountedTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of all terms (T), and the gradient of their sum by a shift of all embeddings (H)."""
    base, number = scorer.base, number_dtype(scorer.base)
    embeddings: Any = base.get_input_embeddings()
    found_T = torch.zeros(len(counted.row_T), dtype=number, device=base.device)
    shift_H = torch.zeros(embeddings.weight.shape[1], dtype=number, device=base.device)
    shift_H.requires_grad_()

    def visit(logprobs_T: torch.Tensor, terms_T: torch.Tensor) -> torch.Tensor:
        found_T[terms_T] = logprobs_T.detach()
        return logprobs_T.sum()

    def shift(_embeddings: Any, _ids: Any, out_BPH: torch.Tensor) -> torch.Tensor:
        return out_BPH + shift_H.to(out_BPH.dtype)

    hook = embeddings.register_forward_hook(shift)
    try:
        with torch.enable_grad():
            packing.sweep(scorer, visit)
    finally:
        hook.remove()
    if shift_H.grad is None:
        raise OddAttentionError("no gradient reaches its embeddings")
    return found_T, shift_H.grad


def excluded_by_config(base: PreTrainedModel) -> str | None:
    """Reason for which the config excludes several rows in one sequence, beyond a short test."""
    config = base.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds and set(kinds) != {"full_attention"}:
        return f"it has layers of the kinds {sorted(set(kinds))}"
    window = getattr(config, "sliding_window", None)
    if not kinds and window is not None and getattr(config, "use_sliding_window", True):
        return f"its attention has a window of {window} tokens"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "its attention is chunked"
    if (rope := growing_rope(config)) is not None:
        return f"its rotary positions are {rope[0]}"
    return None


def _row(offsets: Sequence[int], vocab_size: int) -> Row:
    ids = [(7919 * offset) % vocab_size for offset in offsets]
    zeros = [0.0] * len(ids)
    return Row(ids, [0] + [1] * (len(ids) - 1), zeros, zeros)
