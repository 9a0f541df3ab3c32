"""The adapter that a learner's base model bears, with its optimizer. Child side only."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers import PreTrainedModel

from langchain_art.errors import ConfigError
from langchain_art_server.backends.models.adapter_files import Identity, identity
from langchain_art_server.backends.models.adapter_reader import lora_dtype
from langchain_art_server.backends.peft import adapter_io
from langchain_art_server.backends.peft.logprob_scoring import Scorer, number_dtype


class HeldAdapter:
    """One base model, and one LoRA adapter on it at a time. To be inherited.

    An adapter is read from disk once: while its files stay what they are, what is in memory is it.
    """

    base: PreTrainedModel
    _scorer: Scorer

    def __init__(self, optimizer: str) -> None:
        self._kind = optimizer
        self._peft: peft.PeftModel | None = None
        self._config = b""
        self._held: Identity | None = None
        self._weights: LoraWeights | None = None
        self._optimizer = adapter_io.new_optimizer([nn.Parameter(torch.zeros(1))], optimizer)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters, by names on disk. `rounded` must be called where it was changed."""
        return self._weights.masters if self._weights else {}

    def rounded(self) -> None:
        """Let the model compute with `parameters`."""
        if self._weights is not None:
            self._weights.round_to_model()

    def _with_lora(self, shape: peft.LoraConfig) -> peft.PeftModel:
        with warnings.catch_warnings():  # of PEFT's, which asks the base by a name of old
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            return peft.get_peft_model(self.base, shape)  # pyright: ignore[reportReturnType]

    def _hold(self, folder: Path) -> None:
        """Load an adapter and its optimizer, unless they are in memory."""
        found = identity(folder)
        if found == self._held:
            return
        self._put_on(adapter_io.read_config(folder))
        adapter_io.load_weights(folder, self.parameters)
        self.rounded()
        adapter_io.load_optimizer(folder, self.parameters, self._optimizer, self._kind)
        self._held = found

    def _put_on(self, config: bytes) -> None:
        """Put LoRA layers of that config on the base, unless they are, with a new optimizer."""
        self._held = None
        if self._peft is None or config != self._config:
            try:
                shape = peft.LoraConfig(**json.loads(config) | {"inference_mode": False})
                if self._peft is not None:
                    self._scorer.model = self.base = self._peft.unload()
                    self._peft = None
                self._scorer.model = self._peft = self._with_lora(shape).eval()
            except (TypeError, ValueError) as error:
                raise ConfigError(f"PEFT refuses the adapter's config: {error}") from error
            self._config = config
            self._weights = LoraWeights(self._peft, self.base)
        self._optimizer = adapter_io.new_optimizer(self.parameters.values(), self._kind)

    def _base_only(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._peft is None else self._peft.disable_adapter()

    @contextlib.contextmanager
    def _bearing(self, adapter: Path) -> Generator[None]:
        """A context in which the base bears another adapter than the held one, of any shape.

        After it the held one's weights and its state of Adam are what they were, to the bit.

        Raises:
            ConfigError: the other adapter cannot be read, or is of another model.
        """
        own, held, state = self._config, self._held, self._optimizer.state_dict()
        weights = {name: one.detach().clone() for name, one in self.parameters.items()}
        try:
            self._put_on(adapter_io.read_config(adapter))
            adapter_io.load_weights(adapter, self.parameters)
            self.rounded()
            yield
        finally:
            self._put_on(own)
            adapter_io.copy_weights(weights, self.parameters)
            self.rounded()
            self._optimizer.load_state_dict(state)
            self._held = held


class LoraWeights:
    """The trainable weights of `model`, which has PEFT's layers on `base`.

    On a float32 or float64 base they are the model's own parameters. On a bfloat16 base LoRA is
    computed in bfloat16, as vLLM does: float32 would keep a second copy of each linear layer's
    input for the backward pass, and convert every activation. But a bfloat16 weight has 8 bits, and
    an optimizer's update is often less than that: it would be lost. So weights, gradients and
    Adam's state are float32 (master weights, arXiv 1710.03740, section 3.1), of which the model has
    a rounded copy.
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
