"""LoRA adapters beside the base weights: several at once, each row of a batch routed to its own.

``y = W x + (alpha / r) · B (A x)``, unmerged and in the order in which PEFT computes it, so that
the sampler's logprobs are those of a learner that uses PEFT. Adapters are directories in PEFT's
format; whatever this file does not compute exactly is refused instead of being left out.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from langchain_art.errors import ConfigError
from langchain_art_server.backends.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE

_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

#: Fields of PEFT's config that say nothing about arithmetic, or that are read below.
_NEUTRAL = frozenset(
    (
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "megatron_core",
        "megatron_config",
        "qalora_group_size",
        "bias",
    )
)


@dataclass(eq=False)
class Adapter:
    """A loaded adapter.

    Attributes:
        name: what requests call it.
        path: the directory that it was read from.
        scaling: alpha / r (alpha / sqrt(r) for rank-stabilised LoRA).
        root: its root in the prefix cache.
        users: calls that run on it, or wait for it.
        retired: it was unloaded and goes when `users` is 0.
    """

    name: str
    path: Path
    scaling: float
    root: int
    modules: tuple[str, ...] = ()
    users: int = 0
    retired: bool = False


@dataclass
class Route:
    """Which rows of the next forward pass belong to which adapter. No rows listed: all of them."""

    groups: list[tuple[Adapter, Tensor | None]] = field(default_factory=list)


class LoraLinear(nn.Module):
    """A linear layer with the low-rank pairs of every adapter that targets it."""

    def __init__(self, base: nn.Linear, route: Route) -> None:
        super().__init__()
        self.base, self.route = base, route
        self.pairs: dict[Adapter, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, …, in]`` -> ``[rows, …, out]``."""
        y = self.base(x)
        for adapter, rows in self.route.groups:
            pair = self.pairs.get(adapter)
            if pair is None:
                continue
            down, up = pair
            mine = x if rows is None else x[rows]
            delta = mine.to(down.dtype) @ down @ up * adapter.scaling
            if rows is not None:
                y[rows] = (y[rows] + delta).to(y.dtype)
            else:
                y = (y + delta).to(y.dtype)
        return y


class AdapterBank:
    """The adapters of one model. Linear layers are wrapped when the first adapter needs them."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._linears = {
            name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
        }
        self._wrapped: dict[str, LoraLinear] = {}
        self._route = Route()

    def load(self, name: str, path: Path, root: int) -> Adapter:
        """Load an adapter's directory. Raises ConfigError, see `read`."""
        scaling, pairs = self.read(path)
        adapter = Adapter(name, path, scaling, root, tuple(pairs))
        for module, (down, up) in pairs.items():
            layer = self._wrapped.get(module) or self._wrap(module)
            # Transposed once: y = x @ A^T @ B^T.
            layer.pairs[adapter] = (down.to(self._device).t(), up.to(self._device).t())
        return adapter

    def read(self, path: Path) -> tuple[float, dict[str, tuple[Tensor, Tensor]]]:
        """An adapter's scaling, and A ``[rank, in]`` and B ``[out, rank]`` of each module.

        The model's own weights are not looked at: they may be on torch's ``meta`` device.

        Raises:
            ConfigError: a file is missing or broken, a tensor is missing, unknown, of the wrong
                shape or not finite, or the adapter is of a kind that is not computed here.
        """
        config = _read_config(path)
        rank = cast(int, config["r"])
        alpha = float(config["lora_alpha"])
        pairs = self._pairs(path, rank)
        self._check_targets(path, config, set(pairs))
        return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank, pairs

    def unload(self, adapter: Adapter) -> None:
        """Free an adapter's weights."""
        for module in adapter.modules:
            self._wrapped[module].pairs.pop(adapter, None)

    def route(self, adapters: list[Adapter | None]) -> None:
        """Route the next forward pass: entry i is the adapter of row i, None the base model."""
        rows: dict[Adapter, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                rows.setdefault(adapter, []).append(row)
        self._route.groups = [
            (a, None if len(r) == len(adapters) else torch.tensor(r, device=self._device))
            for a, r in rows.items()
        ]

    def _wrap(self, module: str) -> LoraLinear:
        layer = self._wrapped[module] = LoraLinear(self._linears[module], self._route)
        parent, _, child = module.rpartition(".")
        setattr(self._model.get_submodule(parent), child, layer)
        return layer

    def _pairs(self, path: Path, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
        try:
            tensors = load_file(path / WEIGHTS_FILE)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path / WEIGHTS_FILE} can not be read: {error}") from error
        sides: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            match = _KEY.fullmatch(key.removeprefix(_PREFIX))
            module = match["module"] if match else ""
            if match is None or module not in self._linears:
                raise ConfigError(
                    f"{path}: got a tensor {key!r}, expected only lora_A and lora_B weights of the "
                    "model's linear layers. The adapter was made for another model."
                )
            if not torch.isfinite(tensor).all():
                raise ConfigError(f"{path}: {key} holds numbers that are not finite.")
            sides.setdefault(module, {})[match["side"]] = tensor.float()
        return {module: self._pair(path, module, found, rank) for module, found in sides.items()}

    def _pair(
        self, path: Path, module: str, found: dict[str, Tensor], rank: int
    ) -> tuple[Tensor, Tensor]:
        linear = self._linears[module]
        expected = {"A": (rank, linear.in_features), "B": (linear.out_features, rank)}
        for side, shape in expected.items():
            if side not in found:
                raise ConfigError(f"{path}: lora_{side} of {module} is missing.")
            if tuple(found[side].shape) != shape:
                raise ConfigError(
                    f"{path}: got lora_{side} of {module} with shape {tuple(found[side].shape)}, "
                    f"expected {shape} (rank {rank} in {CONFIG_FILE})."
                )
        return found["A"], found["B"]

    def _check_targets(self, path: Path, config: dict[str, Any], found: set[str]) -> None:
        if not found:
            raise ConfigError(f"{path}: {WEIGHTS_FILE} holds no tensors.")
        targets = config.get("target_modules")
        if not targets or config.get("layers_to_transform") or config.get("exclude_modules"):
            return
        if isinstance(targets, str):
            missing = {n for n in self._linears if re.fullmatch(targets, n)} - found
        else:
            ends = tuple(f".{target}" for target in targets)
            missing = {n for n in self._linears if f".{n}".endswith(ends)} - found
        if missing:
            raise ConfigError(
                f"{path}: {CONFIG_FILE} targets {sorted(missing)[0]} and {len(missing) - 1} other "
                f"layers for which {WEIGHTS_FILE} has no tensors."
            )


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / WEIGHTS_FILE).is_file():
        raise ConfigError(
            f"{path}: {WEIGHTS_FILE} is missing. Adapters in other formats (.bin) are not read; "
            "save the adapter with safe_serialization=True."
        )
    try:
        config = json.loads((path / CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / CONFIG_FILE} can not be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path / CONFIG_FILE}: expected a JSON object.")
    config = cast(dict[str, Any], config)
    rank = config.get("r")
    if config.get("peft_type") != "LORA" or not isinstance(rank, int) or rank < 1:
        raise ConfigError(
            f"{path / CONFIG_FILE}: got peft_type={config.get('peft_type')!r} and r={rank!r}, "
            "expected 'LORA' and a positive rank."
        )
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(
            f"{path / CONFIG_FILE}: got lora_alpha={alpha!r}, expected a finite number."
        )
    for key, value in config.items():
        if (value and key not in _NEUTRAL) or (key == "bias" and value != "none"):
            raise ConfigError(
                f"{path / CONFIG_FILE}: {key}={value!r} is not supported; only plain LoRA weights "
                "(and rank-stabilised scaling) are."
            )
    return config
