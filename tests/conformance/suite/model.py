r"""A model whose weights are computed, and which says what a prompt's script tells it to.

`write_model` writes a model folder that any engine can serve. Its chat template
(``chat_template.jinja``) finds the script (`tests.conformance.suite.scripts`), and writes
the reply that is due before the generation prompt, in a block of `BLOCK` tokens. The model is a
Llama of one layer with biases in its attention and without MLP. Its head copies the token ``L``
positions back: as far as the block's beginning is from that of the reply.

- Queries and keys are biases. Rotary embedding turns both by the angles ``position * f_i``. As the
  query's bias is at the angle ``-L * f_i``, the score of a key ``d`` positions back is
  ``SHARPNESS * sum_i cos(f_i * (d - L))``, with ``f_i = 10^(-i/32)`` and i from 0 to 31. It is 56
  nats lower beside its peak at ``d = L``, and nowhere in the context nearer to the peak than that.
- Each token that can be said has a code of 28 signs, two of which differ in 8 or more. An
  embedding holds the token's code; value and output projections copy it to dimensions of their
  own; a row of the head is the token's code there. So the logits of another text are lower by
  `GAP_NATS` or more. What fills the block has the code of ``<|im_end|>``.

A token is a byte, but ``<|im_end|>``, ``<tool_call>`` and ``</tool_call>``, so that a grammar that
allows one token alone allows the one that is due. Each byte has two tokens of one code: sampled at
temperature 1, each is drawn with log-probability -log 2. The tokenizer's decoder removes a mark
from the second one's name, and no text is ever tokenised as it. So the tokens of a text are not
those that were sampled, and two replies of the same text have different tokens. Where a grammar is
in force, engines may know no text of the second ones, and never draw them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as lib
from safetensors.numpy import save_file

from tests.conformance.suite.scripts import PAST_END, UNSCRIPTED

BLOCK = 1024
"""Tokens of the block; a reply has fewer bytes."""
CONTEXT = 32768
"""Positions."""
SHARPNESS = 16.0
GAP_NATS = 40.0
"""Between the logits of what is due and of any other text, at least."""

TWINS = range(256, 512)
"""Ids of the bytes' second tokens, which only sampling gives."""

_HIDDEN = 64
_PAIRS = _HIDDEN // 2
_BITS = 28
_DISTANCE = 8  # of two codes, in signs
_CONSTANT = _HIDDEN - 1  # the dimension in which all embeddings are 1
_ROPE_BASE = 10.0
_TWIN = "‡"  # in a token's name, where the alphabet of bytes has no such character
_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CALL = ("<tool_call>", "</tool_call>")
_REPLY = f"{_START}assistant\n"


def write_model(folder: Path | str) -> Path:
    """Write the model folder (0.4 MB): weights, tokenizer, chat template.

    Args:
        folder: is made if there is none; files of the same names are replaced.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    size = tokenizer.get_vocab_size()
    reply = len(tokenizer.encode(_REPLY, add_special_tokens=False).ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = _weights(_said(tokenizer), size, back=BLOCK + reply - 1)
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
    end, pad = tokenizer.token_to_id(_END), tokenizer.token_to_id(_PAD)
    _write(folder / "config.json", _config(size, end, pad))
    _write(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": pad})
    names = {"eos_token": _END, "pad_token": _PAD, "tokenizer_class": "PreTrainedTokenizerFast"}
    _write(folder / "tokenizer_config.json", names | {"model_max_length": CONTEXT})
    (folder / "chat_template.jinja").write_text(_template(), encoding="utf-8")
    return folder


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _template() -> str:
    text = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    values = {"block": BLOCK, "past_end": PAST_END, "unscripted": UNSCRIPTED}
    lines = [f"{{%- set {name} = {json.dumps(value)} %}}" for name, value in values.items()]
    return "\n".join(lines) + "\n" + text


def _config(size: int, end: int, pad: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "attention_bias": True,
        "mlp_bias": False,
        "head_dim": _HIDDEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": _ROPE_BASE,
        "rope_parameters": {"rope_theta": _ROPE_BASE, "rope_type": "default"},
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "float32",
    }


def _alphabet() -> list[str]:
    """The name of each byte's token."""
    return sorted(lib.pre_tokenizers.ByteLevel.alphabet())


def _tokenizer() -> Any:
    """Bytes, their twins, and Qwen's special tokens."""
    names = [byte + mark for mark in ("", _TWIN) for byte in _alphabet()]
    tokenizer = lib.Tokenizer(lib.models.BPE({name: at for at, name in enumerate(names)}, []))
    pre, decode = lib.pre_tokenizers, lib.decoders
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decode.Sequence([decode.Replace(_TWIN, ""), decode.ByteLevel()])
    tokenizer.add_special_tokens([_PAD, _START, _END])
    tokenizer.add_tokens([lib.AddedToken(name, normalized=False) for name in _CALL])
    return tokenizer


def _said(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """For each code, the tokens that have it, and those of them that are said."""
    groups = [[byte, byte + _TWIN] for byte in _alphabet()] + [[name] for name in _CALL]
    said = [[tokenizer.token_to_id(name) for name in group] for group in groups]
    end = [tokenizer.token_to_id(_END)]
    unsaid = [tokenizer.token_to_id(name) for name in (_PAD, _START)]
    return [(end + unsaid, end), *((ids, ids) for ids in said)]


def _codes(count: int) -> Any:
    """Signs ``[count, _BITS]``, of which two rows differ in `_DISTANCE` places or more."""
    draws = np.random.default_rng(0)
    kept = draws.choice([-1, 1], (1, _BITS))
    while len(kept) < count:
        one = draws.choice([-1, 1], (1, _BITS))
        if (kept != one).sum(1).min() >= _DISTANCE:
            kept = np.concatenate([kept, one])
    return kept


def _weights(said: list[tuple[list[int], list[int]]], size: int, back: int) -> dict[str, Any]:
    """The tensors of the folder, float32; the head looks `back` positions back."""

    def zeros(*shape: int) -> Any:
        return np.zeros(shape, np.float32)

    embeddings, head = zeros(size, _HIDDEN), zeros(size, _HIDDEN)
    value, output = zeros(_HIDDEN, _HIDDEN), zeros(_HIDDEN, _HIDDEN)
    own, copied = np.arange(_BITS), np.arange(_BITS) + _BITS
    value[own, own] = output[copied, own] = 1
    # Sizes of what the two norms make of a code: all tokens have the same number of ones.
    first = 1 / np.sqrt((_BITS + 1) / _HIDDEN)
    last = 1 / np.sqrt((_BITS + 1 + _BITS * first**2) / _HIDDEN)
    scale = GAP_NATS / (2 * _DISTANCE * first * last)
    embeddings[:, _CONSTANT] = 1
    head[:, _CONSTANT] = -4 * GAP_NATS / last
    for code, (tokens, spoken) in zip(_codes(len(said)), said, strict=True):
        embeddings[tokens, :_BITS] = code
        head[np.ix_(spoken, copied)] = scale * code
        head[spoken, _CONSTANT] = 0
    angles = back * _ROPE_BASE ** (-np.arange(_PAIRS) / _PAIRS)
    # Attention divides by the root of the head's size.
    size_of_both = np.sqrt(SHARPNESS * np.sqrt(_HIDDEN))
    query = size_of_both * np.concatenate([np.cos(angles), -np.sin(angles)])
    key = size_of_both * np.repeat([1.0, 0.0], _PAIRS)
    layer, attention = "model.layers.0", "model.layers.0.self_attn"
    ones = np.ones(_HIDDEN, np.float32)
    return {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": head,
        "model.norm.weight": ones,
        f"{layer}.input_layernorm.weight": ones.copy(),
        f"{layer}.post_attention_layernorm.weight": ones.copy(),
        f"{attention}.q_proj.weight": zeros(_HIDDEN, _HIDDEN),
        f"{attention}.q_proj.bias": query.astype(np.float32),
        f"{attention}.k_proj.weight": zeros(_HIDDEN, _HIDDEN),
        f"{attention}.k_proj.bias": key.astype(np.float32),
        f"{attention}.v_proj.weight": value,
        f"{attention}.v_proj.bias": zeros(_HIDDEN),
        f"{attention}.o_proj.weight": output,
        f"{attention}.o_proj.bias": zeros(_HIDDEN),
        **{
            f"{layer}.mlp.{name}_proj.weight": zeros(_HIDDEN, _HIDDEN)
            for name in ("gate", "up", "down")
        },
    }
