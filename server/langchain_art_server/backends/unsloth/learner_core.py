"""Unsloth's model under our loss: the one file that knows it. Child side only.

Only its public interface is used: `FastLanguageModel.from_pretrained` and `get_peft_model`, which
give a transformers model and PEFT layers with kernels of their own. Loss, rows, optimizer and files
are ours, so an adapter is the same whichever learner made it, up to rounding.
"""

# ruff: noqa: I001 - Unsloth patches transformers and PEFT, so it is imported before them
from __future__ import annotations

from typing import Any, cast

from unsloth import FastLanguageModel  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

import peft
import transformers
from torch import nn

from langchain_art.errors import ConfigError
from langchain_art_server.backends.models.base_weights import (
    base_outline,
    check_finite,
    read_config,
)
from langchain_art_server.backends.models.base_weights import in_four_bits
from langchain_art_server.backends.peft.learner_core import process_core
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.logprob_scoring import Scorer
from langchain_art_server.backends.peft.packer import Packer
from langchain_art_server.backends.unsloth.packed_rows import UnslothPacker

#: Context of a model whose config does not say.
MAX_MODEL_LEN = 32768


class UnslothCore(LearnerCore):
    """`LearnerCore` on a model that Unsloth loaded.

    On a GPU, where Unsloth's own attention does not support a forest, rows are padded; the reason
    is logged, and `metrics["forest"]` is 0. On a CPU its model is plain transformers.

    Args:
        max_model_len: tokens of the longest row; None: what the model's config allows.
        base: as for `LearnerCore`.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(self, *, max_model_len: int | None = None, **base: Any) -> None:
        self._longest = max_model_len
        super().__init__(**base)

    def _load(self) -> transformers.PreTrainedModel:
        try:
            base_outline(self.name, self.dtype)
            config = read_config(self.name)
            quantized = in_four_bits(config, self.name)
            if quantized and self.device.type != "cuda":
                raise ConfigError(
                    f"got a base in 4 bits for Unsloth on {self.device}, expected a CUDA device; "
                    'learn with kind = "peft"'
                )
            allowed = getattr(config.get_text_config(), "max_position_embeddings", MAX_MODEL_LEN)
            where: dict[str, Any] = {"device_map": {"": self.device}}
            loaded, _ = FastLanguageModel.from_pretrained(
                self.name,
                max_seq_length=self._longest or min(allowed, MAX_MODEL_LEN),
                dtype=self.dtype,
                load_in_4bit=quantized,  # the file's own numbers; the server compares them
                use_gradient_checkpointing=False,  # the packer decides when it is needed
                use_exact_model_name=True,  # else others of its own, in 4 bits even
                trust_remote_code=False,
                use_safetensors=True,
                **(where if self.device.type == "cuda" else {}),
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
            raise ConfigError(f"Unsloth cannot load the model {self.name!r}: {error}") from error
        found = cast(transformers.PreTrainedModel, loaded)
        nn.Module.eval(found)
        check_finite(self.name, found.state_dict().items())
        return found.requires_grad_(False)

    def _forward(self) -> tuple[Scorer, Packer]:
        scorer = Scorer(self.base)
        # With a mask, its kernels attend to all pairs of a padded batch by a dense matrix.
        scorer.masked = self.device.type != "cuda"
        return scorer, UnslothPacker(scorer)

    def _with_lora(self, shape: peft.LoraConfig) -> peft.PeftModel:
        if shape.lora_dropout or shape.bias != "none":
            raise ValueError(
                f"got lora_dropout={shape.lora_dropout} and bias={shape.bias!r}, expected none"
            )
        targets = shape.target_modules or []
        try:
            dressed: Any = FastLanguageModel.get_peft_model(
                self.base,
                r=shape.r,
                lora_alpha=shape.lora_alpha,
                target_modules=[targets] if isinstance(targets, str) else sorted(targets),
                lora_dropout=0.0,
                bias="none",
                use_gradient_checkpointing=False,
                use_rslora=shape.use_rslora,
            )
        except (AssertionError, RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"Unsloth refuses LoRA on {sorted(targets)}: {error}; name other targets, or learn "
                "with kind = 'peft'"
            ) from error
        return dressed


def make_core(threads: int | None, **options: Any) -> UnslothCore:
    """The core of a process that does nothing else; see `UnslothCore` and `process_core`."""
    return process_core(lambda: UnslothCore(**options), threads)
