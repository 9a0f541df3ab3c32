"""``python -m langchain_art_server.quantize_base MODEL FOLDER``: a base model in 4 bits (NF4).

A server with ``quantization = "nf4"`` runs this before its engines start. Both then load what is
written here: on a GPU and on a CPU, in vLLM and in transformers, the 4-bit weights are the same.
Scales stay in float32 (no double quantisation), so that readers need not compute them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from langchain_art.errors import ConfigError
from langchain_art.packages import made_once
from langchain_art_server.backends.models.base_weights import (
    EXTRA,
    auto_class,
    base_outline,
    check_blocks,
    check_device,
    check_finite,
    in_four_bits,
    language_model,
    linears_in_four_bits,
    read_config,
    text_modules,
)
from langchain_art_server.backends.models.device import torch_device
from langchain_art_server.base_copies import DTYPES, chosen_dtype, run_copy

#: Files beside the weights that belong to a model: its tokenizer and templates.
_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model")
#: In the name of a folder: changes when what is written changes.
_FORMAT = "nf4, blocks of 64, float32 scales, 2"


def quantized(
    model: str, folder: Path, device: str | None = None, dtype: str | None = None
) -> Path:
    """The folder below `folder` of a model in 4 bits; made if it is not there.

    Its name has a digest of the source's files (their sizes and times, not their contents) and of
    the dtype: other weights give another folder.

    Args:
        model: hub name or local path of an unquantised causal language model.
        folder: where such folders are.
        device: of the engines; None: cuda or cpu, whichever torch finds.
        dtype: that the layers compute in; None: `default_dtype`.

    Raises:
        ConfigError: bitsandbytes is missing, the device has no kernels, the model cannot be loaded
            or not be quantised as a whole, or it is quantised already.
    """
    where = torch_device(device)
    check_device(where)
    chosen = chosen_dtype(dtype, where, "quantization")
    source = _local(model)
    key = hashlib.sha256(json.dumps([_FORMAT, chosen, *_files(source)]).encode()).hexdigest()
    out = folder / f"{Path(model).name}-nf4-{key[:12]}"
    return made_once(out, lambda made: _write(source, DTYPES[chosen], made))


def _local(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    try:
        wanted = [*_BESIDE, "*.safetensors"]
        return Path(snapshot_download(model, allow_patterns=wanted))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConfigError(f"the model {model!r} cannot be read from the hub: {error}") from error


def _files(source: Path) -> list[list[Any]]:
    files = sorted({one for kind in ("*.safetensors", *_BESIDE) for one in source.glob(kind)})
    about = [(file.name, file.resolve()) for file in files]
    return [[name, path.stat().st_size, path.stat().st_mtime_ns] for name, path in about]


def _write(source: Path, dtype: torch.dtype, out: Path) -> None:
    name = str(source)
    try:
        config = read_config(name)
        if in_four_bits(config, name) or getattr(config, "quantization_config", None):
            raise ConfigError(
                f"got quantization with the model {name!r}, which is quantised already; expected "
                "the unquantised model"
            )
        outline = base_outline(name, dtype)
        for file in source.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                check_finite(name, ((key, opened.get_tensor(key)) for key in opened.keys()))  # noqa: SIM118
        skipped = [*_not_quantised(outline)]
        model: PreTrainedModel = auto_class(config).from_pretrained(
            name,
            dtype=dtype,
            device_map={"": "cpu"},
            use_safetensors=True,
            trust_remote_code=False,
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=dtype,
                bnb_4bit_use_double_quant=False,
                llm_int8_skip_modules=skipped,
            ),
        )
    except ImportError as error:
        raise ConfigError(f"quantization needs bitsandbytes: {EXTRA} ({error})") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"the model {name!r} cannot be quantised: {error}") from error
    _check_whole(model)
    model.save_pretrained(out)
    for pattern in _BESIDE:
        for file in source.glob(pattern):
            if not (out / file.name).exists() and "safetensors" not in file.name:
                shutil.copyfile(file, out / file.name)


def _not_quantised(outline: PreTrainedModel) -> Iterator[str]:
    """Names of the head and of a vision model's parts; vLLM's have no ``model.`` in front."""
    head, text = outline.get_output_embeddings(), text_modules(outline)
    whole = [module for module in outline.modules() if text & {*module.modules()}]
    for parent, module in outline.named_modules():
        for name, child in module.named_children() if module in whole else ():
            if child is head or child not in whole:
                yield from {(path := f"{parent}.{name}".lstrip(".")), path.removeprefix("model.")}


def _check_whole(model: PreTrainedModel) -> None:
    """Raises ConfigError unless all matrices but embeddings and head are in whole blocks of NF4.

    vLLM would quantise the others by itself, otherwise than here. A vision model stays as it is.
    """
    ends = {
        id(parameter)
        for end in (model.get_input_embeddings(), model.get_output_embeddings())
        for parameter in (end.parameters() if isinstance(end, nn.Module) else ())
    }
    layers = linears_in_four_bits(model)
    check_blocks(layers)
    held = {id(layer.weight) for layer in layers.values()}
    for name, parameter in language_model(model).named_parameters():
        if parameter.dim() > 1 and id(parameter) not in ends | held:
            raise ConfigError(
                f"got quantization with {type(model).__name__}, whose {name} is no linear layer "
                "(an expert of a mixture, or a convolution) and would stay as it is in the learner "
                "and not in vLLM; expected a dense model"
            )


if __name__ == "__main__":
    run_copy("quantize_base", quantized)
