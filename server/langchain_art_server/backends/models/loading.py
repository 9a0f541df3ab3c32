"""Loads and checks a model and its tokenizer, from the Hugging Face hub or a directory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jinja2 import TemplateError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from langchain_art.errors import ConfigError
from langchain_art_server.backends.base import ModelInfo
from langchain_art_server.backends.models.device import torch_device
from langchain_art_server.backends.models.four_bits import load_causal, weights_in, weights_of
from langchain_art_server.config import Settings

_MAX_MODEL_LEN = 32768
_PROBE = "zq"


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model of transformers and what a sampler needs to know of it."""

    model: Any  # in evaluation mode, on its device
    tokenizer: Any
    eos: set[int]  # every token id that ends a reply
    info: ModelInfo  # `max_model_len` is an upper bound: a small KV cache may lower it


def load_model(settings: Settings) -> LoadedModel:
    """Load `settings.model`: weights from safetensors only, and no code of the model is run.

    Raises:
        ConfigError: the model, its tokenizer, device, dtype or context do not fit; says which.
    """
    device = torch_device(settings.device)
    loaded = _load(settings, device)
    loaded.model.requires_grad_(False)
    return loaded


def load_outline(settings: Settings) -> LoadedModel:
    """The same without weights, on torch's ``meta`` device: for an engine in another process.

    Takes no memory, and does not initialise CUDA. Raises as `load_model`.
    """
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return _load(settings, torch.device(device), weights=False)


def _load(settings: Settings, device: torch.device, *, weights: bool = True) -> LoadedModel:
    dtype, name = _dtype(settings.dtype, device), settings.model
    auto, model = cast(Any, AutoModelForCausalLM), cast(Any, None)
    try:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(name, trust_remote_code=False)
        if weights:
            model = load_causal(name, dtype, device)
            held = weights_of(model)
        else:
            config = cast(Any, AutoConfig).from_pretrained(name, trust_remote_code=False)
            held = weights_in(name, config)
            with torch.device("meta"):
                model = auto.from_config(config)
            with contextlib.suppress(OSError):  # not every model has one
                model.generation_config = GenerationConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        local = Path(name).is_dir()
        where = "this directory" if local else "the Hugging Face hub (or its cache)"
        raise ConfigError(f"The model {name!r} can not be loaded from {where}: {error}") from error
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    info = ModelInfo(
        name=settings.base_name,
        path=settings.model,
        parameters=model.num_parameters(),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=_max_len(settings, config),
        vocab_size=int(getattr(head, "out_features", None) or config.vocab_size),
        longest_token=max(map(len, tokenizer.get_vocab())),
        weights=held,
    )
    return LoadedModel(model, tokenizer, eos_ids(model, tokenizer), info)


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"got dtype={name!r}, expected 'float32', 'bfloat16' or 'float16'.")
    return dtype


def _max_len(settings: Settings, config: Any) -> int:
    trained: int | None = getattr(config, "max_position_embeddings", None)
    asked = settings.max_model_len
    if asked is None:
        return min(trained or _MAX_MODEL_LEN, _MAX_MODEL_LEN)
    if trained is not None and asked > trained:
        raise ConfigError(
            f"got max_model_len={asked}, and {settings.model} has a context of {trained} tokens; "
            "lower max_model_len or leave it out."
        )
    return asked


def eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """The end-of-sequence ids of all configs, and the token that the template ends a turn with."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, list) else {ids} if isinstance(ids, int) else set()
    rest = ""
    for said in (_PROBE, [{"type": "text", "text": _PROBE}]):  # some templates want parts
        dialog = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
        try:
            text: str = tokenizer.apply_chat_template(dialog, tokenize=False)
        except (TemplateError, ValueError, TypeError, AttributeError):
            continue  # no template, or one that refuses this dialog
        if _PROBE in text:
            rest = text.rpartition(_PROBE)[2].lstrip()
            break
    specials = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    found |= {i for content, i in specials.items() if content and rest.startswith(content)}
    return found
