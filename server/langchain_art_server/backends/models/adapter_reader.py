"""Reads a LoRA adapter from disk and checks it against the model before any engine loads it.

Adapters are directories in PEFT's format. Whatever the samplers do not compute exactly is refused
here instead of being ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from langchain_art.errors import ConfigError
from langchain_art.wire.policies import MAX_RANK
from langchain_art_server.backends.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from langchain_art_server.backends.models.base_weights import text_modules

_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
#: Fields of PEFT's config that do not change what the adapter computes, or that are read below.
_ALLOWED_FIELDS = {
    *("task_type", "peft_type", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_core", "qalora_group_size"),
}


@dataclass(frozen=True)
class AdapterWeights:
    """The weights of one LoRA adapter, on the CPU in float32."""

    scaling: float  # alpha / r (alpha / sqrt(r) for rank-stabilised LoRA)
    #: Per linear layer, A ``[rank, in]`` and B ``[out, rank]``.
    pairs: dict[str, tuple[Tensor, Tensor]]


def lora_dtype(base: torch.dtype, otherwise: torch.dtype) -> torch.dtype:
    """The dtype that sampler and learner compute LoRA in: a half-precision base's, as vLLM does."""
    return base if base in (torch.bfloat16, torch.float16) else otherwise


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that a text goes through, by their names in the whole model."""
    text = text_modules(model)
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m in text}


def read_adapter(path: Path, linears: Mapping[str, nn.Linear]) -> AdapterWeights:
    """Read and check the adapter in `path`.

    Of `linears` (see `linear_layers`), only shapes are read: they may be on the ``meta`` device.

    Raises ConfigError: a file is missing or broken; a tensor is missing, unknown, of the wrong
    shape or not finite; or the adapter uses a feature of PEFT that the samplers do not compute.
    """
    config = read_config(path)
    rank, alpha = cast(int, config["r"]), float(config["lora_alpha"])
    pairs = _read_pairs(path, rank, linears)
    _check_targets(path, config, set(pairs), linears)
    return AdapterWeights(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), pairs)


def _read_pairs(
    path: Path, rank: int, linears: Mapping[str, nn.Linear]
) -> dict[str, tuple[Tensor, Tensor]]:
    try:
        tensors = load_file(path / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path / WEIGHTS_FILE} can not be read: {error}") from error
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key.removeprefix(_PREFIX))
        if match is None or match["module"] not in linears:
            raise ConfigError(
                f"{path}: got a tensor {key!r}, expected only lora_A and lora_B weights of the "
                "language model's linear layers. The adapter was made for another model: use "
                "that, or another --data-dir if the server made it."
            )
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{path}: {key} holds numbers that are not finite.")
        sides.setdefault(match["module"], {})[match["side"]] = tensor.float()
    for module, found in sides.items():
        layer = linears[module]
        expected = {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
        for side, shape in expected.items():
            if side not in found:
                raise ConfigError(f"{path}: lora_{side} of {module} is missing.")
            if tuple(found[side].shape) != shape:
                raise ConfigError(
                    f"{path}: got lora_{side} of {module} with shape {tuple(found[side].shape)}, "
                    f"expected {shape} (rank {rank} in {CONFIG_FILE})."
                )
    return {module: (found["A"], found["B"]) for module, found in sides.items()}


def _check_targets(
    path: Path, config: dict[str, Any], found: set[str], linears: Mapping[str, nn.Linear]
) -> None:
    """Check that the layers that have tensors are those that the config targets, by PEFT's rules.

    Without targets, PEFT takes those that it knows for an architecture: nothing is checked.
    """
    from peft import LoraConfig  # noqa: PLC0415  takes a second, which an engine without adapters
    from peft.tuners.tuners_utils import check_target_module_exists  # noqa: PLC0415  need not wait

    if not found:
        raise ConfigError(f"{path}: {WEIGHTS_FILE} holds no tensors.")
    if not (targets := config.get("target_modules")):
        return
    if targets == "all-linear":  # but the head
        targets = sorted({name.rpartition(".")[2] for name in found})
    which = ("exclude_modules", "layers_to_transform", "layers_pattern")
    limits: dict[str, Any] = {one: config.get(one) for one in which}
    try:
        shape = LoraConfig(target_modules=targets, **limits)
        wanted = {name for name in linears if check_target_module_exists(shape, name)}
    except (TypeError, ValueError, re.error) as error:
        raise ConfigError(f"{path}: PEFT refuses the targets of {CONFIG_FILE}: {error}") from error
    for few, verb in ((wanted - found, "no tensors"), (found - wanted, "tensors all the same")):
        if few:
            does = "targets" if few <= wanted else "does not target"
            raise ConfigError(
                f"{path}: {CONFIG_FILE} {does} {sorted(few)[0]} and {len(few) - 1} other "
                f"layers, for which {WEIGHTS_FILE} has {verb}."
            )


def read_config(path: Path) -> dict[str, Any]:
    """The config of an adapter, which names no code and nothing that the engines do not compute.

    Raises ConfigError: it is broken, has such a field, or there are no safetensors beside it.
    """
    if not (path / WEIGHTS_FILE).is_file():
        raise ConfigError(
            f"{path}: {WEIGHTS_FILE} is missing. Adapters in other formats (.bin) are not read; "
            "save the adapter with safe_serialization=True."
        )
    file = path / CONFIG_FILE
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can not be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: expected a JSON object.")
    config = cast(dict[str, Any], config)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    is_rank = isinstance(rank, int) and 1 <= rank <= MAX_RANK
    if config.get("peft_type") != "LORA" or not is_rank:
        raise ConfigError(
            f"{file}: got peft_type={config.get('peft_type')!r} and r={rank!r}, expected 'LORA' "
            f"and a rank of 1 to {MAX_RANK}."
        )
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(f"{file}: got lora_alpha={alpha!r}, expected a finite number.")
    for key, value in config.items():
        if (value and key not in _ALLOWED_FIELDS) or (key == "bias" and value != "none"):
            raise ConfigError(
                f"{file}: {key}={value!r} is not supported; only plain LoRA weights (and "
                "rank-stabilised scaling) are."
            )
    return config
