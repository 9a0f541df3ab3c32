"""``python -m langchain_art_server.merge_adapter BASE ADAPTER OUT``: merge an adapter.

Both are loaded in float32 on the CPU (four bytes a parameter), so that what is compared is the
merging and not the rounding; the weights are then written in the base's own dtype.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from langchain_art.errors import ArtError, ConfigError
from langchain_art_server.backends.models.adapter_reader import read_config

#: Largest difference of a logit between adapter and merged model, in float32.
TOLERANCE = 1e-3


def merge(base: str, adapter: Path, out: Path) -> float:
    """Write `base` with `adapter` merged into it to `out`, in safetensors, with its tokenizer.

    Returns:
        The largest difference of any logit from the adapter's, on a fixed row of tokens.

    Raises:
        ConfigError: the base or the adapter cannot be loaded, or do not fit each other.
        ArtError: the merged model's logits differ by more than `TOLERANCE`; nothing is written.
    """
    try:
        read_config(adapter)
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype="auto", device_map=None, use_safetensors=True, trust_remote_code=False
        )
        own_dtype: torch.dtype = model.dtype
        model = model.float()
        tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
        adapted = PeftModel.from_pretrained(model, str(adapter))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"{adapter} cannot be put on {base!r}: {error}") from error
    adapted.eval()
    wanted = _logits(adapted)
    merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)  # pyright: ignore[reportAssignmentType]
    merged.eval()
    difference = float((_logits(merged) - wanted).abs().max())
    if not difference <= TOLERANCE:  # so that NaN is a failure too
        raise ArtError(
            f"The merged model's logits differ from the adapter's by {difference:g}, expected at "
            f"most {TOLERANCE:g}; nothing was written"
        )
    merged.to(own_dtype).save_pretrained(out, safe_serialization=True)  # pyright: ignore[reportArgumentType]
    tokenizer.save_pretrained(out)
    return difference


@torch.inference_mode()
def _logits(model: torch.nn.Module) -> torch.Tensor:
    vocabulary: int = model.config.vocab_size  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
    tokens = torch.arange(1, 33).remainder(vocabulary)[None]
    return model(input_ids=tokens).logits


def main() -> None:
    """The command; a failure is one message and exit code 1."""
    if len(sys.argv) != 4:
        sys.exit("usage: python -m langchain_art_server.merge_adapter BASE ADAPTER OUT")
    base, adapter, out = sys.argv[1:]
    try:
        difference = merge(base, Path(adapter), Path(out))
    except ArtError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    sys.stdout.write(f"merged; logits differ by at most {difference:.2g} in float32\n")


if __name__ == "__main__":
    main()
