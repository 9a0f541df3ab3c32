"""Whether a model supports token forests: its config, and a comparison with padded rows.

Child side only.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from langchain_art.wire.tolerances import logprob_tolerance
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.models.growing_rope import growing_rope
from langchain_art_server.backends.peft.forest.attention_interface import (
    FOREST_ATTENTION,
    OddAttentionError,
)
from langchain_art_server.backends.peft.forest.packing import ForestRows
from langchain_art_server.backends.peft.logprob_scoring import Scorer
from langchain_art_server.backends.peft.micro_batches import CountedTokens
from langchain_art_server.backends.peft.padded_rows import PaddedRows
from langchain_art_server.backends.peft.training_batch import sweep_logprobs

log = logging.getLogger(__name__)
#: Forest and padded rows sum in different orders, which doubles the rounding of half precision.
HALF_FACTOR = 2.0
#: Rows that share beginnings, as offsets from an arbitrary token.
_ROWS = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 9, 4, 4], [1, 3, 2, 5, 8], [6, 2, 1, 9])


def has_plain_head(base: PreTrainedModel) -> bool:
    """Whether the output head alone makes the logits (no scaling or soft-capping behind it)."""
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
    before: Any = getattr(base.config, "_attn_implementation")  # noqa: B009 - its only name
    why = _by_config(base)
    if why is None:
        rows = [_row(offsets, base.config.get_text_config().vocab_size) for offsets in _ROWS]
        counted = CountedTokens.of(rows)
        terms = len(counted.row_T)
        expected = sweep_logprobs(PaddedRows(rows, counted, base), scorer, terms)
        try:
            base.set_attn_implementation(FOREST_ATTENTION)
            forest = ForestRows(rows, counted, 8, float("inf"), base)
            gap = (sweep_logprobs(forest, scorer, terms) - expected).abs().mean().item()
            dtype = str(base.dtype).removeprefix("torch.")
            if not gap <= logprob_tolerance(dtype, half_factor=HALF_FACTOR):
                why = f"its logprobs differ by {gap:.3g} nats on average"
        except torch.OutOfMemoryError:
            raise  # not a property of the model
        except (OddAttentionError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            log.debug("The forest does not fit the model.", exc_info=True)
            why = str(error) or type(error).__name__
    if why is not None:
        base.set_attn_implementation(before)
    return why


def _by_config(base: PreTrainedModel) -> str | None:
    """Why the config excludes forests: for what a short comparison would not notice."""
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
    if base.device.type not in ("cpu", "cuda"):
        return f"there is no forest attention for {base.device.type}"
    return None


def _row(offsets: list[int], vocab_size: int) -> Row:
    ids = [(7919 * offset) % vocab_size for offset in offsets]
    zeros = [0.0] * len(ids)
    return Row(ids, [0] + [1] * (len(ids) - 1), zeros, zeros)
