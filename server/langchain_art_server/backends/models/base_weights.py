"""The base model's weights, from safetensors: every one is the file's, or the load is refused.

transformers makes up at random what a file lacks, and leaves out what it does not know. What it
lets through without a word is let through here: weights that the config ties to others, buffers
that it computes (``rotary_emb.inv_freq``, ``position_ids``), and what the model's class names in
``_keys_to_ignore_on_load_missing`` and ``_keys_to_ignore_on_load_unexpected``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Generator, Iterable, Mapping, Sized
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from langchain_art.errors import ArtError, ConfigError
from langchain_art_server.backends.models.four_bits import (
    check_device,
    compute_exactly,
    in_four_bits,
)
from langchain_art_server.start_checks import INDEX, WEIGHTS

_AUTO = cast(Any, AutoModelForCausalLM)
_META = torch.device("meta")
# Where it is installed, PEFT imports it. It warns of a kernel that it lacks, which
# `compute_exactly` turns off.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class _LoadReport(logging.Filter):
    """Keeps transformers' table of what it found in a file out of the log: it is said in words."""

    text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging."""
        if " LOAD REPORT" not in (said := record.getMessage()):
            return True
        self.text = said
        return False


@contextlib.contextmanager
def in_one_line(name: str, file: str) -> Generator[None]:
    """Whatever a model's files make transformers raise, as a ConfigError of one line."""
    try:
        yield
    except ArtError:
        raise
    except Exception as error:
        local = Path(name).is_dir()
        where = "this directory" if local else "the Hugging Face hub (or its cache)"
        words = " ".join(str(error).split())
        raise ConfigError(
            f"The model {name!r} can not be loaded from {where}: {file}: "
            f"{type(error).__name__}: {words}"
        ) from error


def read_config(name: str) -> Any:
    """A model's config; code that comes with it is never run. Raises ConfigError."""
    with in_one_line(name, "config.json"):
        return cast(Any, AutoConfig).from_pretrained(name, trust_remote_code=False)


def base_outline(name: str, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    """The model on torch's ``meta`` device: no memory, the names and shapes of its files checked.

    Of a checkpoint in 4 bits, it is the model before quantisation. One that is quantised otherwise
    is not checked here: only its own loader knows its names.

    Raises:
        ConfigError: no model can be made of the config, or the files do not fit it.
    """
    config = read_config(name)
    four_bits = in_four_bits(config, name)
    if not four_bits and getattr(config, "quantization_config", None):
        with in_one_line(name, "config.json"), _META:
            model = _AUTO.from_config(config)
        with contextlib.suppress(OSError):  # not every model has one
            model.generation_config = GenerationConfig.from_pretrained(name)
    else:
        if four_bits:
            del config.quantization_config
        model = _read(name, dtype, config=config, device_map={"": _META})
    if model.get_output_embeddings() is None:
        raise ConfigError(
            f"The model {name!r} cannot be used: by its config.json it is a "
            f"{type(model).__name__}, which has no output head; expected a causal language model"
        )
    return model


def load_causal(
    name: str, dtype: torch.dtype | Literal["auto"], device: torch.device
) -> PreTrainedModel:
    """A causal language model from safetensors, frozen, in evaluation mode, on its device.

    Weights in 4 bits stay in 4 bits. Code that comes with a model is never run.

    Raises:
        ConfigError: the model is quantised in a way, or for a device, that is not supported; its
            files cannot be read, or do not fit its config; or a number of theirs is not finite.
    """
    base_outline(name, dtype)
    if quantized := in_four_bits(read_config(name), name):
        check_device(device)
    model = _read(name, dtype, **({"device_map": {"": device}} if quantized else {}))
    if quantized:
        compute_exactly(model)
    else:
        nn.Module.to(model, device)
    check_finite(name, model.state_dict().items())  # with the scales of weights in 4 bits
    return model.eval().requires_grad_(False)


def _read(name: str, dtype: torch.dtype | Literal["auto"], **options: Any) -> PreTrainedModel:
    """Load a model as transformers does, if every weight is the files'."""
    report, log = _LoadReport(), logging.getLogger("transformers.modeling_utils")
    log.addFilter(report)
    try:
        with in_one_line(name, _file(name)):
            model, found = _AUTO.from_pretrained(
                name,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
                **options,
            )
    except ConfigError:
        if parts := re.findall(r"^(\S+) +\| \S*CONVERSION", report.text, re.MULTILINE):
            raise _misfit(
                name, f"does not give {parts[0]!r}{and_others(parts)}, which config.json asks for"
            ) from None
        with in_one_line(name, "config.json"), _META:  # which of the files it is
            _AUTO.from_config(options.get("config") or read_config(name))
        raise
    finally:
        log.removeFilter(report)
    _check_names(name, model, found)
    return model


def _check_names(name: str, model: Any, found: dict[str, Any]) -> None:
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"The model {name!r} has an adapter in its adapter_config.json, expected a base model "
            "alone: name the base, and load the adapter as a policy"
        )
    missing, unexpected = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    shapes = {key: (list(got), list(wanted)) for key, got, wanted in found["mismatched_keys"]}
    # Weights in 4 bits, in the outline of the model before quantisation.
    packed = {key.removesuffix(".absmax") for key in unexpected if key.endswith(".absmax")}
    unexpected = [
        key for key in unexpected if key.rpartition(".weight.")[0] + ".weight" not in packed
    ]
    shapes = {key: both for key, both in sorted(shapes.items()) if key not in packed}
    problems: list[str] = []
    if missing:
        problems.append(f"lacks {missing[0]!r}{and_others(missing)}, which config.json asks for")
    if unexpected:
        problems.append(
            f"holds {unexpected[0]!r}{and_others(unexpected)}, which config.json has no place for"
        )
    if shapes:
        key, (got, wanted) = next(iter(shapes.items()))
        problems.append(f"holds {key!r} as {got}, and config.json has {wanted}{and_others(shapes)}")
    if problems:
        raise _misfit(name, "; it ".join(problems))
    tied: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    if other := sorted(tied.keys() - model.all_tied_weights_keys.keys()):
        raise ConfigError(
            f"The model {name!r} cannot be used: config.json has tie_word_embeddings, by which "
            f"{other[0]} is {tied[other[0]]}, and {_file(name)} holds another {other[0]!r}; "
            "engines take one or the other. Set tie_word_embeddings to false, or leave the tensor "
            "out"
        )


def _misfit(name: str, problem: str) -> ConfigError:
    return ConfigError(
        f"The model {name!r} cannot be used: {_file(name)} {problem}. The missing would be made up "
        "at random; save the model by save_pretrained, without a wrapper, beside its own config"
    )


def _file(name: str) -> str:
    return INDEX if Path(name, INDEX).is_file() else WEIGHTS


def and_others(found: Sized) -> str:
    """Words after the first of several: `` and 3 others``."""
    return f" and {len(found) - 1} others" if len(found) > 1 else ""


def check_finite(name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ConfigError where a number of a model's is NaN or infinite."""
    for key, tensor in tensors:
        if not tensor.is_floating_point() or tensor.itemsize == 1:  # torch adds up no float8
            continue
        if bool(tensor.sum(dtype=torch.float32).isfinite()):
            continue
        if not bool(tensor.isfinite().all()):  # else only the sum is too large
            file = _file(name)
            if file == INDEX:
                file = json.loads(Path(name, INDEX).read_bytes())["weight_map"].get(key, INDEX)
            raise ConfigError(
                f"The model {name!r} cannot be used: {file}: {key!r} holds numbers that are not "
                "finite"
            )


@torch.no_grad()
def check_causal(name: str, model: Any) -> None:
    """Raises ConfigError where what is predicted at a token depends on the tokens after it.

    An encoder, such as BERT's, has a head too, and transformers loads it as a causal model.
    """
    ids = torch.tensor([[1, 2], [1, 3]], device=model.device)
    with in_one_line(name, "config.json"):
        first, second = model(input_ids=ids, use_cache=False).logits[:, 0].float()
    scale = 1e-3 if model.dtype == torch.float32 else 0.1
    if bool((first - second).abs().max() > scale * first.std()):
        raise ConfigError(
            f"The model {name!r} cannot be used: its config.json makes a {type(model).__name__} "
            "whose logits at a token depend on the tokens after it, as an encoder's do; expected a "
            "causal language model"
        )


#: Kinds of transformers' ``modeling_rope_utils`` whose frequencies follow the longest row.
_GROWING = ("dynamic", "longrope")


def growing_rope(config: Any) -> tuple[str, int] | None:
    """The kind of such a RoPE, and the length in tokens above which it changes.

    None: the model has none.

    Args:
        config: of the text model; it may have a RoPE for each kind of layer.
    """
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(inner for inner in rope.values() if isinstance(inner, Mapping))):
        known = cast("Mapping[str, Any]", one)
        if (kind := known.get("rope_type")) in _GROWING:
            return kind, known.get("original_max_position_embeddings") or (
                config.max_position_embeddings
            )
    return None
