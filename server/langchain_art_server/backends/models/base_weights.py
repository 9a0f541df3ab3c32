"""The base model's weights, from safetensors: every one is the file's, or the load is refused.

transformers makes up at random what a file lacks, and leaves out what it does not know. What it
lets through without a word is let through here: weights that the config ties to others, buffers
that it computes (``rotary_emb.inv_freq``, ``position_ids``), and what the model's class names in
``_keys_to_ignore_on_load_missing`` and ``_keys_to_ignore_on_load_unexpected``.

Linear layers may be in 4 bits (NF4, arXiv 2305.14314), read by bitsandbytes. Blocks of 64 weights
share one scale (`absmax`), and each weight is the index of one of 16 values. Sampler and learner
read the same indices and scales from the same file and quantise nothing themselves, so they compute
with the same weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Generator, Iterable, Mapping, Sized
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from langchain_art.errors import ArtError, ConfigError
from langchain_art_server.start_checks import INDEX, PACKAGED, WEIGHTS

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
        others = f"a folder, a GGUF file or {', '.join(PACKAGED)}"
        hint = "" if local else f" (no hub is asked for {others})"
        raise ConfigError(
            f"The model {name!r} can not be loaded from {where}: {file}: "
            f"{type(error).__name__}: {words}{hint}"
        ) from error


def read_config(name: str) -> Any:
    """A model's config; code that comes with it is never run. Raises ConfigError."""
    with in_one_line(name, "config.json"):
        return cast(Any, AutoConfig).from_pretrained(name, trust_remote_code=False)


def auto_class(config: Any) -> Any:
    """The loader of transformers for a config: of the class that its ``architectures`` names.

    A text model inside of a vision model (``…ForConditionalGeneration``) is loaded whole. For some,
    `AutoModelForCausalLM` would leave the vision model out: an adapter would have names that
    neither PEFT on the folder's own class nor vLLM knows, and a merged folder no vision weights.
    """
    whole: Any = cast(Any, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING).get(type(config), None)
    named = config.architectures or []
    if whole is None or config.is_encoder_decoder or (named and whole.__name__ not in named):
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def language_model(model: nn.Module) -> nn.Module:
    """The part of a model that reads text: all of it, or that beside its vision model."""
    config: Any = getattr(model, "config", None)
    if config is None or config.get_text_config() is config:
        return model
    return cast(PreTrainedModel, model).get_decoder()


def text_modules(model: nn.Module) -> set[nn.Module]:
    """All modules that a text goes through: those of the `language_model`, and the head."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return {*language_model(model).modules(), *([] if head is None else [head])}


def text_weights(model: PreTrainedModel) -> int:
    """Number of weights that a text goes through, but for embeddings and head."""
    embedding = model.get_input_embeddings().weight
    text = language_model(model).parameters()
    return sum(p.numel() for p in text if p.shape != embedding.shape)


def base_outline(name: str, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    """The model on torch's ``meta`` device: no memory, the names and shapes of its files checked.

    Of a checkpoint in 4 bits, it is the model before quantisation. One that is quantised otherwise
    is not checked here: only its own loader knows its names.

    Raises ConfigError: no model can be made of the config, or the files do not fit it.
    """
    config = read_config(name)
    four_bits = in_four_bits(config, name)
    if not four_bits and getattr(config, "quantization_config", None):
        with in_one_line(name, "config.json"), _META:
            model = auto_class(config).from_config(config)
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

    Raises ConfigError: the model is quantised in a way, or for a device, that is not supported; its
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
    report, log = _LoadReport(), logging.getLogger("transformers.modeling_utils")
    config = options.pop("config", None) or read_config(name)
    auto = auto_class(config)
    log.addFilter(report)
    try:
        with in_one_line(name, _file(name)):
            model, found = auto.from_pretrained(
                name,
                config=config,
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
            auto.from_config(config)
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
                "finite" + (" in float16" if tensor.dtype == torch.float16 else "")
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
    """The kind of such a RoPE of a text model, and the length in tokens above which it changes."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(inner for inner in rope.values() if isinstance(inner, Mapping))):
        known = cast("Mapping[str, Any]", one)
        if (kind := known.get("rope_type")) in _GROWING:
            return kind, known.get("original_max_position_embeddings") or (
                config.max_position_embeddings
            )
    return None


EXTRA = 'pip install "langchain-art[four-bits]"'  # what installs bitsandbytes
BLOCK = 64  # weights that share a scale
#: Largest relative error of a layer's output against its own weights, in units of the dtype's.
ROUNDING = 16


def in_four_bits(config: Any, name: str) -> bool:
    """True if a config says NF4. Raises ConfigError: another of bitsandbytes' formats."""
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

    Raises ConfigError: a layer computes something else than the product with its weights.
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
    return _digest(scales)


def _digest(scales: Iterable[Tensor]) -> str:
    """Independent of names and order: engines name layers differently."""
    each = sorted(
        hashlib.sha256(
            one.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for one in scales
    )
    return f"nf4 {hashlib.sha256(json.dumps(each).encode()).hexdigest()[:16]}" if each else ""
