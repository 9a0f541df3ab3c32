"""An adapter and its optimizer on disk (the learner's checkpoint), and its LoRA layers.

A directory holds ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT writes them,
and ``optimizer.safetensors``: Adam's state under ``<parameter>.exp_avg``, ``.exp_avg_sq`` and
``.step``, or that of bitsandbytes' 8-bit Adam under the names that it has there; of a float16 base
also `LOSS_SCALE`. A new adapter, which no step has made, has no optimizer file.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import warnings
from collections.abc import Generator, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import peft
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.amp import GradScaler
from transformers import PreTrainedModel

from langchain_art.errors import ConfigError
from langchain_art.wire import LoraConfig
from langchain_art_server.backends.models import adapter_reader
from langchain_art_server.backends.models.adapter_files import (
    ABSORBED,
    CONFIG_FILE,
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
    Identity,
    identity,
)
from langchain_art_server.backends.models.adapter_reader import lora_dtype
from langchain_art_server.backends.models.base_weights import EXTRA, language_model
from langchain_art_server.backends.peft.logprob_scoring import Scorer, number_dtype

SUPERVISED_MOMENTUM = 0.9  # β1 of AdamW in supervised steps
ADAM_EPS = 1e-8
#: In the optimizer's file: the loss scale, and the number of updates since it was changed.
LOSS_SCALE = "loss_scale"
#: Entries of the state of each optimizer per parameter (`LearnerSettings.optimizer`).
OPTIMIZER_STATE = {
    "adamw": ("exp_avg", "exp_avg_sq", "step"),
    "adamw_8bit": (
        *("state1", "state2", "absmax1", "absmax2"),  # moments, and a scale for 256 of each
        *("qmap1", "qmap2", "step"),  # what each of the 256 codes stands for
    ),
}
#: Names of linear layers whose LoRA PEFT moves to stacked experts, where there are any (its
#: `utils/transformers_weight_conversion.py`). No sampler here supports LoRA on experts.
STACKED = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def linear_names(model: PreTrainedModel) -> list[str]:
    """Leaf names of the language model's linear layers that can have LoRA.

    Not the output head, not `ABSORBED`, and not `STACKED` if experts are stacked into one tensor.

    Example: ``["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]``.
    """
    head = model.get_output_embeddings()
    stacked = any(".experts." in name and p.dim() == 3 for name, p in model.named_parameters())
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in adapter_reader.linear_layers(model).items()
            if module is not head
        }
        - ABSORBED
        - (STACKED if stacked else frozenset())
    )


def peft_config(lora: LoraConfig, model: PreTrainedModel, linears: list[str]) -> peft.LoraConfig:
    """PEFT's form of a policy's LoRA shape, with ``all-linear`` as the names in `linears`.

    It leaves out all that stands beside the language model, where layers may have the same names.

    Raises ConfigError: a target is none of `linears`; PEFT would ignore it next to a known one.
    """
    targets = linears if lora.targets == "all-linear" else list(lora.targets)
    # Those of a model that bears an adapter stand within its layers.
    layers = [name.removesuffix(".base_layer") for name in adapter_reader.linear_layers(model)]

    def known(target: str) -> bool:
        fits = any(name == target or name.endswith(f".{target}") for name in layers)
        return fits and target.rpartition(".")[2] in linears

    if unknown := sorted({name for name in targets if not known(name)}):
        raise ConfigError(
            f"got the LoRA targets {unknown}, which are no linear layers of the model; expected "
            f'"all-linear" or names from {linears}'
        )
    if not targets:
        raise ConfigError(f"got no LoRA targets, expected at least one of {linears}")
    text = language_model(model)
    where = next(name for name, module in model.named_modules() if module is text)
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=targets,
        exclude_modules=rf"(?!{re.escape(where)}\.).*" if where else None,
        lora_dropout=0.0,
        bias="none",
        task_type=peft.TaskType.CAUSAL_LM,
    )


def config_bytes(config: peft.LoraConfig) -> bytes:
    """``adapter_config.json`` as PEFT writes it, in a fixed order (PEFT keeps sets)."""
    fields: dict[str, Any] = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
        if key != "runtime_config"
    }
    fields["inference_mode"] = True
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def initialise(parameters: Mapping[str, nn.Parameter], seed: int) -> None:
    """Fill LoRA's A with Kaiming-uniform numbers as PEFT does (a = √5), and B with zeros.

    Drawn on the CPU in float32 and in the order of the names: a seed gives the same numbers on
    every device. With B = 0 the adapter equals the base (LoRA, arXiv 2106.09685, section 4.1).
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(parameters.items()):
            values = torch.zeros(parameter.shape, dtype=torch.float32)
            if ".lora_A." in name or ".lora_embedding_A" in name:
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
            parameter.copy_(values)


def adam_betas(momentum: float) -> tuple[float, float]:
    """β1 and β2 of AdamW, of which β2 is below the usual 0.999, since fits have few steps.

    Example: ``(0.9, 0.99)`` of 0.9, ``(0.6, 0.96)`` of 0.6.
    """
    return momentum, 1 - (1 - momentum) / 10


def new_optimizer(parameters: Iterable[nn.Parameter], kind: str = "adamw") -> torch.optim.Optimizer:
    """AdamW over LoRA's parameters; each step sets its learning rate and momentum.

    Raises ConfigError: it is ``adamw_8bit`` (arXiv 2110.02861), and bitsandbytes is not there.
    """
    chosen = list(parameters)
    if kind == "adamw_8bit":
        try:
            from bitsandbytes.optim.adamw import AdamW8bit  # noqa: PLC0415  an extra
        except ImportError as error:
            raise ConfigError(f"learner.optimizer={kind!r}: {EXTRA} ({error})") from error
        return AdamW8bit(chosen, lr=0.0, eps=ADAM_EPS, weight_decay=0.0, min_8bit_size=0)
    return torch.optim.AdamW(chosen, eps=ADAM_EPS, weight_decay=0.0, foreach=all_at_once(chosen))


def loss_scaler(base: PreTrainedModel) -> GradScaler:
    """The dynamic loss scale of a float16 base, whose small gradients would become zero.

    It begins at 2^16, is halved where a gradient overflows, and doubled after 2000 updates without
    (arXiv 1710.03740, section 3.2). Of other dtypes it does nothing.
    """
    scaler = GradScaler(base.device.type, enabled=base.dtype == torch.float16)
    scaler.scale(torch.zeros((), device=base.device))  # a rank without rows unscales, too
    return scaler


def all_at_once(parameters: Iterable[nn.Parameter]) -> bool:
    """True if one kernel works on many parameters: on GPUs, where each start of one takes time."""
    return all(one.device.type == "cuda" for one in parameters)


def not_finite(parameters: Mapping[str, nn.Parameter]) -> str | None:
    """The name of a parameter that is not finite; None: all are. One number is read then."""
    each = torch.stack([one.detach().isfinite().all() for one in parameters.values()])
    if bool(each.all()):
        return None
    return next(name for name, good in zip(parameters, each.tolist(), strict=True) if not good)


def read_config(folder: Path) -> bytes:
    """The bytes of ``adapter_config.json``. Raises ConfigError as `adapter_reader.read_config`."""
    adapter_reader.read_config(folder)
    try:
        return (folder / CONFIG_FILE).read_bytes()
    except OSError as error:
        raise ConfigError(f"the adapter {folder.name!r} cannot be read: {error}") from error


def load_weights(folder: Path, parameters: Mapping[str, nn.Parameter]) -> None:
    """Copy an adapter's weights into LoRA's parameters.

    Raises ConfigError: the file is missing, broken, of another model, or holds a number that is not
    finite.
    """
    tensors = _load(folder / WEIGHTS_FILE)
    expected = {name: tuple(p.shape) for name, p in parameters.items()}
    got = {name: tuple(t.shape) for name, t in tensors.items()}
    if got != expected:
        odd = sorted(k for k in {*got, *expected} if got.get(k) != expected.get(k))
        raise ConfigError(
            f"the adapter {folder.name!r} does not fit the model: {len(odd)} tensors are missing, "
            f"unknown or of another shape, first {odd[0]!r}: got {got.get(odd[0])}, "
            f"expected {expected.get(odd[0])}"
        )
    copy_weights(tensors, parameters)
    if (name := not_finite(parameters)) is not None:
        raise ConfigError(f"the adapter {folder.name!r} holds numbers that are not finite: {name}")


def copy_weights(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Copy tensors into the parameters of these names."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def load_optimizer(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    kind: str = "adamw",
) -> None:
    """Put an adapter's Adam state into a new optimizer, and its loss scale into a new scaler.

    Nothing if the adapter has none; a scale is left where the base needs none.

    Raises ConfigError: the file is broken, not of these parameters, or not of this optimizer.
    """
    path = folder / OPTIMIZER_FILE
    if not path.exists():
        return
    tensors = _load(path)
    keys = OPTIMIZER_STATE[kind]
    other = next(one for one in OPTIMIZER_STATE if one != kind)
    if any(name.endswith(f".{OPTIMIZER_STATE[other][0]}") for name in tensors):
        raise ConfigError(
            f"got learner.optimizer={kind!r}, and {folder.name!r} was learned with {other!r}; "
            "expected the same: set it back, or begin a new policy"
        )
    for name, parameter in parameters.items():
        state = {key: tensors.pop(f"{name}.{key}", None) for key in keys}
        if all(value is None for value in state.values()):
            continue
        moments = [state[key] for key in keys[:2]]
        if state["step"] is None or any(m is None or m.shape != parameter.shape for m in moments):
            raise ConfigError(f"{path.name} of {folder.name!r} does not fit the parameter {name!r}")
        kept = {key: value for key, value in state.items() if value is not None}
        step, moved = kept.pop("step"), {k: v.to(parameter.device) for k, v in kept.items()}
        # Adam keeps its step on the CPU whatever the parameter's device; 8-bit Adam in a number.
        optimizer.state[parameter] = moved | {"step": int(step) if kind == "adamw_8bit" else step}
    scale = tensors.pop(LOSS_SCALE, None)
    if scale is not None and scaler.is_enabled():
        now, held = scale.tolist()
        scaler.load_state_dict(scaler.state_dict() | {"scale": now, "_growth_tracker": int(held)})
    if tensors:
        raise ConfigError(
            f"{path.name} of {folder.name!r} has unknown tensors: {sorted(tensors)[:3]}"
        )


def write_adapter(
    folder: Path,
    config: bytes,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None = None,
    scale: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write an adapter's files into an existing folder, over those that are there.

    `parameters` are by their names on disk; `optimizer` is None for a new adapter; `scale` is the
    state of a `loss_scaler`.
    """
    (folder / CONFIG_FILE).write_bytes(config)
    _save(folder / WEIGHTS_FILE, {name: p.detach() for name, p in parameters.items()})
    if optimizer is not None:
        state = {
            f"{name}.{key}": torch.as_tensor(value)
            for name, parameter in parameters.items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        if scale:
            state[LOSS_SCALE] = torch.tensor([scale["scale"], scale["_growth_tracker"]])
        _save(folder / OPTIMIZER_FILE, state)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path.name} of {path.parent.name!r} cannot be read: {error}") from error


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    on_cpu = {name: t.to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    try:
        save_file(on_cpu, path, metadata={"format": "pt"})
    except SafetensorError as error:  # no space, say
        raise OSError(f"{path.name} cannot be written: {error}") from error


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
        self._optimizer = new_optimizer([nn.Parameter(torch.zeros(1))], optimizer)
        self._scaler = GradScaler("cpu", enabled=False)

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
        self._put_on(read_config(folder))
        load_weights(folder, self.parameters)
        self.rounded()
        load_optimizer(folder, self.parameters, self._optimizer, self._scaler, self._kind)
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
        self._optimizer = new_optimizer(self.parameters.values(), self._kind)
        self._scaler = loss_scaler(self.base)

    def _base_only(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._peft is None else self._peft.disable_adapter()

    @contextlib.contextmanager
    def _bearing(self, adapter: Path) -> Generator[None]:
        """A context in which the base bears another adapter than the held one, of any shape.

        After it the held one's weights and states of Adam and loss scale are as before, to the bit.

        Raises ConfigError: the other adapter cannot be read, or is of another model.
        """
        own, held, state = self._config, self._held, self._optimizer.state_dict()
        scaler = self._scaler
        weights = {name: one.detach().clone() for name, one in self.parameters.items()}
        try:
            self._put_on(read_config(adapter))
            load_weights(adapter, self.parameters)
            self.rounded()
            yield
        finally:
            self._put_on(own)
            copy_weights(weights, self.parameters)
            self.rounded()
            self._optimizer.load_state_dict(state)
            self._scaler = scaler
            self._held = held


class LoraWeights:
    """The trainable weights of `model`, which has PEFT's layers on `base`.

    On a float32 or float64 base they are the model's own parameters. On a base in 16 bits LoRA is
    computed in its dtype, as vLLM does: float32 would keep a second copy of each linear layer's
    input for the backward pass, and convert every activation. But a bfloat16 weight has 8 bits and
    a float16 one 11, and an optimizer's update is often less than that: it would be lost. So
    weights, gradients and Adam's state are float32 (master weights, arXiv 1710.03740, section 3.1),
    of which the model has a rounded copy.
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
