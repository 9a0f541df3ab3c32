"""What the programs that run TRL's trainers share; for an environment that has TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A word for each token, which is named ``w0``, ``w1`` …; ``w0`` ends a reply, and pads."""
    words = {f"w{i}": i for i in range(vocab)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w0", pad_token="w0")


def save_trained(model: Any, folder: Path) -> None:
    """Write the adapter's weights, as we name them, to ``after.safetensors``."""
    save_file(
        {
            name.replace(".default", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        },
        folder / "after.safetensors",
    )
