"""``python -m langchain_art_server.merge_adapter BASE ADAPTER OUT [--float32]``: merge an adapter.

Everything is computed in float32 on the CPU (four bytes a parameter). The weights are written in
the base's own dtype, whose rounding can lose a small update, or in float32. What was written is
read again and measured on text, as the share of what was trained that it lacks.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

from langchain_art.errors import ArtError, ConfigError
from langchain_art_server.backends.models.adapter_reader import linear_layers, read_adapter
from langchain_art_server.backends.models.base_weights import linears_in_four_bits, load_causal

#: Largest share of what was trained that is lost without a warning.
TOLERANCE = 0.05
#: KL divergences below it, in nats a token, may be float32's own noise: no merge is wrong by them.
NOISE = 1e-6
#: Files of a model with more than text, beside its tokenizer.
_BESIDE = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
#: Most tokens of `TEXT` that are measured.
TOKENS = 256
TEXT = """\
The report was sent on Monday. Ann asked whether the figures for Paris were final; they were not, \
so she wrote to the team again: "Please send the invoice of 3 March, and copy Dr. Okafor."
{"name": "search_mails", "arguments": {"query": "invoice 4711", "from": "ann@example.com"}}
To sort a list in Python, call `sorted(items, key=len)`: it returns a new list. What is 17 times \
23? 17 * 20 = 340 and 17 * 3 = 51, so the answer is 391.
def mean(values):
    return sum(values) / len(values) if values else 0.0
"""


@dataclass(frozen=True)
class Merged:
    """KL divergences from the adapter on its base, in nats a token: what a merge has to keep."""

    trained: float
    """Divergence to the base."""
    left: float
    """Divergence to what was written."""
    dtype: str
    """Dtype of the weights that were written."""

    @property
    def lost(self) -> float:
        """The share of what was trained that was not written; an adapter may have learned none."""
        return self.left / self.trained if self.trained else math.inf if self.left else 0.0

    def __str__(self) -> str:
        said = (
            f"merged in {self.dtype}: {_percent(self.lost)} of what was trained is lost (KL to "
            f"the adapter {self.left:.2g} nats a token; the base's is {self.trained:.2g})"
        )
        if self.lost <= TOLERANCE:
            return said
        return (
            f"WARNING: {said}. {self.dtype} is too coarse for so small an update: write float32 "
            "weights (--float32), or serve the adapter itself"
        )


def merge(base: str, adapter: Path, out: Path, *, float32: bool = False) -> Merged:
    """Write `base` with `adapter` merged into it to `out`, in safetensors, with its tokenizer.

    Layers of a base in 4 bits are written in the dtype that they compute in.

    Raises:
        ConfigError: the base or the adapter cannot be loaded, or do not fit each other.
        ArtError: the merged model is another one than the adapter on its base, or its logits are
            not finite; nothing is written.
    """
    try:
        model: Any = load_causal(base, "auto", torch.device("cpu"))
        dtype: torch.dtype = torch.float32 if float32 else model.dtype
        if linears_in_four_bits(model):
            model = model.dequantize()
        model = model.float()
        tokenizer: Any = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
        read_adapter(adapter, linear_layers(model))  # PEFT ignores what does not fit
        adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"{adapter} cannot be put on {base!r}: {why}") from error
    tokens = _tokens(model, tokenizer)
    wanted = _logprobs(adapted, tokens)
    with adapted.disable_adapter():
        trained = _kl(wanted, _logprobs(adapted, tokens))
    merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)  # pyright: ignore[reportAssignmentType]
    wrong = _kl(wanted, _logprobs(merged, tokens))
    if not wrong <= max(NOISE, TOLERANCE * trained):  # so that NaN is a failure too
        raise ArtError(
            f"The merged model is {wrong:.2g} nats a token (KL) from the adapter, before any "
            f"rounding, and the base is {trained:.2g} from it; expected at most {TOLERANCE:g} of "
            "that. PEFT's merge is not right for this model; nothing was written"
        )
    name, rounded = str(dtype).removeprefix("torch."), nn.Module.to(merged, dtype).parameters()
    if not all(bool(one.isfinite().all()) for one in rounded):
        raise ArtError(
            f"The merged weights do not fit into {name}: numbers of them would be infinite. Write "
            "them in float32 (--float32); nothing was written"
        )
    merged.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    is_text = merged.config is merged.config.get_text_config()
    for file in () if is_text else _BESIDE:
        if found := cached_file(base, file, _raise_exceptions_for_missing_entries=False):
            shutil.copyfile(found, out / file)
    del model, adapted, merged, rounded  # the memory is needed once more
    written = load_causal(str(out), torch.float32, torch.device("cpu"))
    left = _kl(wanted, _logprobs(written, tokens))
    if not math.isfinite(left):
        shutil.rmtree(out)
        raise ArtError(
            f"The merged weights do not fit into {name}: the model's logits are not finite. Write "
            "them in float32 (--float32); nothing was written"
        )
    return Merged(trained, left, name)


def _percent(share: float) -> str:
    """A share in words: below 0.01% it is rounding of the measurement itself."""
    return f"{100 * share:.2g}%" if share >= 1e-4 else "less than 0.01%"


def _tokens(model: PreTrainedModel, tokenizer: Any) -> Tensor:
    """`TEXT` as tokens that the model has, one row."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    ids: Tensor = tokenizer(TEXT, return_tensors="pt").input_ids
    ids = ids[ids < len(next(model.get_input_embeddings().parameters()))]
    if not len(ids):
        raise ConfigError(f"the tokenizer of {model.name_or_path!r} makes no tokens of a text")
    return ids[None, : min(TOKENS, longest or TOKENS)]


@torch.inference_mode()
def _logprobs(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits[0].double().log_softmax(-1)


def _kl(p: Tensor, q: Tensor) -> float:
    """KL(p ‖ q) of logprobs, the mean over their rows; 0 where they are equal."""
    return float((p.exp() * (p - q)).sum(-1).mean())


def main() -> None:
    """The command; a failure is one message and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m langchain_art_server.merge_adapter")
    parser.add_argument("base")
    parser.add_argument("adapter", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--float32", action="store_true")
    chosen = parser.parse_args()
    try:
        done = merge(chosen.base, chosen.adapter, chosen.out, float32=chosen.float32)
    except ArtError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    sys.stdout.write(f"{done}\n")


if __name__ == "__main__":
    main()
