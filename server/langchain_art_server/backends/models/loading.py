"""Loads and checks a model and its tokenizer, from the Hugging Face hub or a directory."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, cast

import torch
from jinja2 import TemplateError
from transformers import AutoTokenizer

from langchain_art.errors import ConfigError
from langchain_art_server.backends.base import ModelInfo
from langchain_art_server.backends.models.base_weights import (
    and_others,
    base_outline,
    check_causal,
    growing_rope,
    in_one_line,
    load_causal,
    read_config,
    weights_in,
    weights_of,
)
from langchain_art_server.backends.models.device import default_dtype, torch_device
from langchain_art_server.config import TEMPLATES, TOOLS_TEMPLATE, Settings

log = logging.getLogger(__name__)
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

    Raises ConfigError: the model, its tokenizer, device, dtype or context do not fit; says which.
    """
    return _load(settings, torch_device(settings.device))


def load_outline(settings: Settings) -> LoadedModel:
    """The same without weights, on torch's ``meta`` device: for an engine in another process.

    Takes no memory, and does not initialise CUDA. Raises as `load_model`.
    """
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return _load(settings, torch.device(device), weights=False)


def _load(settings: Settings, device: torch.device, *, weights: bool = True) -> LoadedModel:
    dtype, name = _dtype(settings.dtype, device), settings.model
    read = read_config(name)  # before the tokenizer, whose loader reads it too
    tokenizer = load_tokenizer(name, settings.chat_template)
    _check_beginning(name, tokenizer)
    if weights:
        model: Any = load_causal(name, dtype, device)
        check_causal(name, model)
        held = weights_of(model)
    else:
        model = base_outline(name, dtype)
        held = weights_in(name, read)
    _check_tokens(name, tokenizer, known_tokens(model))
    config = model.config.get_text_config()
    info = ModelInfo(
        name=settings.base_name,
        path=settings.model,
        parameters=model.num_parameters(),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=_max_len(settings, config),
        vocab_size=int(getattr(model.get_output_embeddings(), "out_features", config.vocab_size)),
        longest_token=max(map(len, tokenizer.get_vocab())),
        weights=held,
    )
    return LoadedModel(model, tokenizer, eos_ids(model, tokenizer), info)


def load_tokenizer(name: str, template: str | None = None) -> Any:
    """A model's tokenizer; its chat template is `template` (`Settings.chat_template`), if given.

    Raises ConfigError: it cannot be read, or has no template that tools could be shown before.
    """
    with in_one_line(name, "tokenizer.json or tokenizer_config.json"):
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(name, trust_remote_code=False)
    if template == TOOLS_TEMPLATE:
        own: Any = tokenizer.chat_template
        if isinstance(own, dict):
            own = cast(dict[str, Any], own).get("default")
        if not own:
            raise ConfigError(
                f"got chat_template={template!r} with the model {name!r}, which has no chat "
                "template for it to go before; expected a file with a whole one"
            )
        said = [{"role": role, "content": _PROBE} for role in ("system", "user")]
        refuses = _rendered(tokenizer, said, chat_template=own) is None
        first = "user" if refuses else "system"
        before = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
        template = f"{{%- set art_first = {first!r} -%}}{before.rstrip()}{own}"
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _rendered(tokenizer: Any, said: list[dict[str, Any]], **options: Any) -> str | None:
    """A conversation by a chat template; None: there is no template, or it refuses this one."""
    try:
        return tokenizer.apply_chat_template(said, tokenize=False, **options)
    except (TemplateError, ValueError, TypeError, AttributeError):
        return None


def _check_beginning(name: str, tokenizer: Any) -> None:
    """Warns of a chat template without the token that the tokenizer puts before every text."""
    bos: str | None = tokenizer.bos_token
    if bos is None or tokenizer(_PROBE).input_ids[0] != tokenizer.bos_token_id:
        return
    text = _rendered(tokenizer, [{"role": "user", "content": _PROBE}])
    if text is not None and not text.lstrip().startswith(bos):  # of none, others complain
        log.warning(
            "The chat template begins prompts of %r with %r, and its tokenizer begins every text "
            "with %r: a model that was trained with it says nonsense without it. Write "
            "{{ bos_token }} at the template's beginning.",
            name,
            text.lstrip()[:20],
            bos,
        )


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    dtype = getattr(torch, name or default_dtype(device), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"got dtype={name!r}, expected 'float32', 'bfloat16' or 'float16'.")
    return dtype


def _max_len(settings: Settings, config: Any) -> int:
    trained: int | None = getattr(config, "max_position_embeddings", None)
    asked, rope = settings.max_model_len, growing_rope(config)
    if asked is None:
        return min(rope[1] if rope else trained or _MAX_MODEL_LEN, _MAX_MODEL_LEN)
    if rope is not None and asked > rope[1]:
        raise ConfigError(
            f"got max_model_len={asked}, and by its config.json {settings.model}'s {rope[0]} "
            f"rotary positions change above {rope[1]} tokens, for all tokens of a longer call, "
            "which could not be trained; lower max_model_len or leave it out."
        )
    if trained is not None and asked > trained:
        raise ConfigError(
            f"got max_model_len={asked}, and {settings.model} has a context of {trained} tokens; "
            "lower max_model_len or leave it out."
        )
    return asked


def known_tokens(model: Any) -> int:
    """Number of tokens that both embedding and head know."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return min(len(next(end.parameters())) for end in ends)


def _check_tokens(name: str, tokenizer: Any, rows: int) -> None:
    """Raises ConfigError where a text may be tokenised to an id that the embedding has no row for.

    Tokens that stand for images or sound, as in Gemma 3's text models, are let through.
    """
    known: dict[str, Any] = tokenizer.special_tokens_map
    others = {str(known.get(f"{kind}_token")) for kind in ("image", "audio", "video")}
    beyond = [(i, t) for t, i in tokenizer.get_vocab().items() if i >= rows and t not in others]
    if beyond:
        id_, text = min(beyond)
        raise ConfigError(
            f"The model {name!r} cannot be served: its tokenizer has {text!r} with the id {id_}"
            f"{and_others(beyond)}, expected ids below {rows}, the rows of its embedding; save "
            "it with the tokenizer that it was trained with, or after resize_token_embeddings"
        )


def eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """The end-of-sequence ids of all configs, and the token that the template ends a turn with.

    Raises ConfigError: a config has one that is no token of the model.
    """
    found, rows = set[int](), known_tokens(model)
    for file, source in (
        ("generation_config.json", model.generation_config),
        ("config.json", model.config),
        ("tokenizer_config.json", tokenizer),
    ):
        ids: Any = getattr(source, "eos_token_id", None)
        each: list[Any] = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(one) is int and 0 <= one < rows for one in each):
            raise ConfigError(
                f"The model {model.config.name_or_path!r} cannot be served: {file} has "
                f"eos_token_id={ids!r}, expected ids of 0 to {rows - 1}"
            )
        found.update(each)
    rest = ""
    for said in (_PROBE, [{"type": "text", "text": _PROBE}]):  # some templates want parts
        dialog = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
        if _PROBE in (text := _rendered(tokenizer, dialog) or ""):
            rest = text.rpartition(_PROBE)[2].lstrip()
            break
    specials = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    found |= {i for content, i in specials.items() if content and rest.startswith(content)}
    return found
