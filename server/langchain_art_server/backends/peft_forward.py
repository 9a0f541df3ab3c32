"""Rows through a causal model: padding, and logits only where a token counts. Child side only.

Index suffixes: B rows of a micro-batch, T positions of a padded row, M the positions of a
micro-batch whose next token counts, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from langchain_art.errors import ConfigError
from langchain_art_server.algorithms.samples import Row


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right, and the tokens in them that count, laid end to end."""

    ids_BT: Tensor
    attention_BT: Tensor
    select_BT: Tensor
    """True where the *next* token counts."""
    targets_M: Tensor
    sampler_logprobs_M: Tensor
    advantages_M: Tensor
    temperature_M: Tensor


def collate(
    rows: Sequence[Row], number: torch.dtype, device: torch.device, *, every_token: bool = False
) -> Batch:
    """Pad rows on the right and pick the tokens that count.

    Args:
        rows: of similar length, to waste little.
        number: dtype of logprobs, advantages and temperatures.
        device: where the tensors go.
        every_token: count every token but the first of each row, not only trained ones.
    """
    shape = (len(rows), max(len(row.token_ids) for row in rows))
    ids_BT, attention_BT = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    mask_BT = torch.zeros(shape, dtype=torch.bool)
    logprobs_BT, advantages_BT, temperature_BT = (
        torch.zeros(shape, dtype=number) for _ in range(3)
    )
    for b, row in enumerate(rows):
        n = len(row.token_ids)
        ids_BT[b, :n] = torch.tensor(row.token_ids)
        attention_BT[b, :n] = 1
        mask_BT[b, :n] = True if every_token else torch.tensor(row.mask, dtype=torch.bool)
        logprobs_BT[b, :n] = torch.tensor(row.logprobs, dtype=number)
        advantages_BT[b, :n] = torch.tensor(row.advantages, dtype=number)
        temperature_BT[b] = row.temperature
    mask_BT[:, 0] = False  # nothing comes before the first token
    select_BT = mask_BT.roll(-1, dims=1)
    tensors = (ids_BT, attention_BT, select_BT)
    counted = (ids_BT, logprobs_BT, advantages_BT, temperature_BT)
    return Batch(*(t.to(device) for t in (*tensors, *(t[mask_BT] for t in counted))))


def selected_logits(model: nn.Module, base: PreTrainedModel, batch: Batch) -> Tensor:
    """Logits (M, V) at the selected positions only.

    The rows' hidden states are thinned out on their way into the output head, by a hook on the
    head itself: whatever the architecture does to logits behind it (scaling, soft-capping) is done
    as ever, and no logits of context are ever computed.

    Args:
        model: what is called: `base`, or PEFT's wrapper around it.
        base: whose output head it is.
        batch: the rows.

    Raises:
        ConfigError: the architecture does something else with its hidden states.
    """
    head = base.get_output_embeddings()
    assert head is not None  # load_base saw to it

    def thin(_head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0][batch.select_BT][None], *args[1:])

    # The mask and the positions are explicit, so that nothing is guessed from them: without a
    # mask, transformers takes a jump in the positions for the start of another document.
    inputs: dict[str, Tensor] = {"input_ids": batch.ids_BT, "attention_mask": batch.attention_BT}
    if "position_ids" in inspect.signature(base.forward).parameters:
        positions_T = torch.arange(batch.ids_BT.shape[1], device=batch.ids_BT.device)
        inputs["position_ids"] = positions_T.expand(batch.ids_BT.shape)
    hook = head.register_forward_pre_hook(thin)
    try:
        logits_1MV: Tensor = model(**inputs, use_cache=False).logits
    finally:
        hook.remove()
    if logits_1MV.shape[:2] != (1, len(batch.targets_M)):
        raise ConfigError(
            f"the architecture {type(base).__name__} does not give one row of logits for each "
            f"hidden state: got {tuple(logits_1MV.shape)}; it cannot be trained here"
        )
    return logits_1MV[0]


def load_base(model: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The base model, frozen and without dropout.

    Weights are read from safetensors only, and code that comes with a model is never run.

    Raises:
        ConfigError: it cannot be loaded, or it is not a causal language model.
    """
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
        )
        nn.Module.to(loaded, device).eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"the learner cannot load the model {model!r} on {device}: {error}"
        ) from error
    if loaded.get_output_embeddings() is None:
        raise ConfigError(f"the model {model!r} has no output head, expected a causal model")
    return loaded.requires_grad_(False)
