"""Checkpoints whose linear layers are in 4 bits (NF4, arXiv 2305.14314), read by bitsandbytes.

Blocks of 64 weights share one scale (`absmax`), and each weight is the index of one of 16 values.
Sampler and learner read the same indices and scales from the same file and quantise nothing
themselves, so they compute with the same weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from langchain_art.errors import ConfigError

#: What installs bitsandbytes.
EXTRA = 'pip install "langchain-art[four-bits]"'
#: Weights that share a scale.
BLOCK = 64
#: Largest relative error of a layer's output against its own weights, in units of the dtype's.
ROUNDING = 16


def in_four_bits(config: Any, name: str) -> bool:
    """True if a checkpoint's linear layers are in NF4, by its config.

    Raises:
        ConfigError: they are bitsandbytes' in another format.
    """
    found: Any = getattr(config, "quantization_config", None) or {}
    about: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    if about.get("quant_method") != "bitsandbytes":
        return False
    kind = about.get("bnb_4bit_quant_type")
    if not about.get("load_in_4bit") or kind != "nf4":
        raise ConfigError(
            f"got the model {name!r}, which bitsandbytes quantised with load_in_4bit="
            f"{about.get('load_in_4bit')} and bnb_4bit_quant_type={kind!r}, expected NF4; give the "
            'unquantised model and quantization = "nf4"'
        )
    return True


def check_device(device: torch.device) -> None:
    """Raises ConfigError where bitsandbytes has no kernels that were tested or read."""
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(
            f"got a base in 4 bits on the device {device}, expected cuda or cpu: for others "
            "bitsandbytes has no kernels that give the same numbers; leave quantization out"
        )


def linears_in_four_bits(model: nn.Module) -> dict[str, Any]:
    """Bitsandbytes' linear layers by name; none in a model that is not quantised."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and hasattr(module.weight, "quant_state")
    }


def check_blocks(layers: Mapping[str, Any]) -> None:
    """Raises ConfigError where a block of weights is in two rows, or has not `BLOCK` of them."""
    for name, layer in layers.items():
        if layer.in_features % BLOCK or layer.weight.quant_state.blocksize != BLOCK:
            raise ConfigError(
                f"got a base in 4 bits whose {name} has {layer.in_features} inputs, in blocks of "
                f"{layer.weight.quant_state.blocksize}; expected multiples of {BLOCK}, in blocks "
                "of as many: for others bitsandbytes takes wrong scales on a CPU"
            )


def compute_exactly(model: PreTrainedModel) -> None:
    """Let a model's layers compute in its dtype with the weights that are in the file.

    On a CPU with AVX512-BF16, bitsandbytes rounds scales and inputs to bfloat16 in passes without
    gradients, and packs the weights anew: sampler and learner would differ. That is turned off.

    Raises:
        ConfigError: a layer computes something else than the product with its weights.
    """
    from bitsandbytes.functional import dequantize_4bit  # noqa: PLC0415  an extra

    layers = linears_in_four_bits(model)
    check_blocks(layers)
    for layer in layers.values():
        layer.support_avx512bf16_for_cpu = False
        layer.compute_dtype, layer.compute_type_is_set = model.dtype, True
    name, layer = next(iter(layers.items()))
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4, layer.in_features, generator=generator).to(model.device, model.dtype)
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(model.dtype)
        expected = nn.functional.linear(x, weight, layer.bias)
        error = (layer(x) - expected).norm() / expected.norm()
    if not error <= ROUNDING * torch.finfo(model.dtype).eps:
        raise ConfigError(
            f"bitsandbytes computes {name} {float(error):.2g} (relative) off the product with its "
            f"own weights, expected {model.dtype}'s rounding; take the release that "
            "requirements/gpu.txt names"
        )


def weights_of(model: nn.Module) -> str:
    """Quantisation of a model's weights: ``nf4`` and a digest of all scales; empty: none."""
    layers = linears_in_four_bits(model)
    return _digest(layer.weight.quant_state.absmax for layer in layers.values())


def weights_in(name: str, config: Any) -> str:
    """The same of a local checkpoint that is not loaded. Raises ConfigError if it is not local."""
    if not in_four_bits(config, name):
        return ""
    files = sorted(Path(name).glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"got the model {name!r}, a checkpoint in 4 bits that is no local folder with "
            'safetensors; give its folder, or the unquantised model and quantization = "nf4"'
        )
    scales: list[Tensor] = []
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                scales += [opened.get_tensor(k) for k in opened.keys() if k.endswith(".absmax")]  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
    return _digest(one for one in scales)


def _digest(scales: Iterable[Tensor]) -> str:
    """Independent of names and order: engines name layers differently."""
    each = sorted(
        hashlib.sha256(
            one.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for one in scales
    )
    return f"nf4 {hashlib.sha256(json.dumps(each).encode()).hexdigest()[:16]}" if each else ""
