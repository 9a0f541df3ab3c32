"""LoRA's weights as they are learned, and as the model computes with them. Child side only.

On a bfloat16 base LoRA is computed in bfloat16, as vLLM does: float32 would keep a second copy of
each linear layer's input for the backward pass, and convert every activation. But a bfloat16 weight
has 8 bits, and an optimizer's update is often less than that: it would be lost. So weights,
gradients and Adam's state are float32 (master weights, arXiv 1710.03740, section 3.1), of which the
model has a rounded copy.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from langchain_art_server.backends.models.adapter_reader import lora_dtype
from langchain_art_server.backends.peft.logprob_scoring import number_dtype


class LoraWeights:
    """The trainable weights of `model`, which has PEFT's layers on `base`.

    On a float32 or float64 base they are the model's own parameters.
    """

    def __init__(self, model: nn.Module, base: PreTrainedModel) -> None:
        #: What is learned, by the names on disk: in float32, or in float64 on a float64 base.
        self.masters: dict[str, nn.Parameter] = {}
        self._rounded: list[tuple[nn.Parameter, nn.Parameter]] = []
        number = number_dtype(base)
        computed = lora_dtype(base.dtype, number)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            parameter.data = parameter.data.to(computed)
            master = parameter
            if computed != number:
                master = nn.Parameter(parameter.detach().to(number))
                parameter.register_post_accumulate_grad_hook(partial(_add_gradient, master))
                self._rounded.append((parameter, master))
            self.masters[name.replace(".default", "")] = master

    def round_to_model(self) -> None:
        """Let the model compute with the masters, which were changed."""
        with torch.no_grad():
            for parameter, master in self._rounded:
                parameter.copy_(master)


def _add_gradient(master: nn.Parameter, parameter: torch.Tensor) -> None:
    """Add a micro-batch's gradient to the master's: sums of many are exact only there."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad += parameter.grad
    parameter.grad = None
