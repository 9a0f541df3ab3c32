"""A small random model as a GGUF file, in the way that llama.cpp's converter writes one."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGUFWriter, TokenType
from torch import Tensor

from tests.support.tiny_models import load_plain

#: transformers' model_type -> llama.cpp's architecture.
_ARCHITECTURES = {"gemma3_text": "gemma3"}


def save_gguf(model: Path, file: Path, kind: str = "F32", **changes: Any) -> Path:
    """Write a folder's model; `changes` are fields beside its own, or in their place.

    Matrices are of the type `kind`, as ``Q8_0``.
    """
    loaded = load_plain(model)
    config, family = loaded.config, loaded.config.model_type
    family = _ARCHITECTURES.get(family, family)
    writer = GGUFWriter(file, family)
    said: dict[str, Any] = {
        "general.name": "tiny",
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{family}.attention.key_length": config.head_dim,
        f"{family}.attention.value_length": config.head_dim,
        f"{family}.rope.dimension_count": config.head_dim,
        f"{family}.vocab_size": config.vocab_size,
        **_tokenizer(model, config.vocab_size),
    }
    rope: dict[str, Any] = config.rope_parameters
    rope = rope.get("full_attention", rope)
    said[f"{family}.rope.freq_base"] = float(rope["rope_theta"])
    if "gemma" in family:
        said[f"{family}.attention.sliding_window"] = config.sliding_window
    for key, value in (said | changes).items():
        _field(writer, key, value)
    names = gguf.get_tensor_name_map(_arch(family), config.num_hidden_layers)
    for key, tensor in loaded.state_dict().items():
        if key == "lm_head.weight" and tensor.equal(loaded.get_input_embeddings().weight):
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        _tensor(writer, name, _as_llama_cpp(family, key, tensor, config), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _arch(family: str) -> Any:
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)


def _field(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tensor(writer: GGUFWriter, name: str, tensor: Tensor, kind: str) -> None:
    numbers = tensor.float().numpy()
    if tensor.dim() == 1 or kind == "F32":
        writer.add_tensor(name, numbers)
        return
    stored = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(numbers, stored), raw_dtype=stored)


def _as_llama_cpp(family: str, key: str, tensor: Tensor, config: Any) -> Tensor:
    """llama.cpp rotates neighbours where transformers rotates halves, and adds one to norms."""
    if family == "llama" and ("q_proj" in key or "k_proj" in key):
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()
    return tensor + 1 if family.startswith("gemma") and key.endswith("norm.weight") else tensor


def _tokenizer(model: Path, size: int) -> dict[str, Any]:
    known = json.loads((model / "tokenizer.json").read_text())
    ids: dict[str, int] = known["model"]["vocab"] | {
        one["content"]: one["id"] for one in known["added_tokens"]
    }
    special = {one["content"] for one in known["added_tokens"] if one["special"]}
    plain = {one["content"] for one in known["added_tokens"]} - special
    tokens = [token for token, _ in sorted(ids.items(), key=lambda one: one[1])]
    missing = [f"<unused{at}>" for at in range(size - len(tokens))]
    kinds = [
        TokenType.CONTROL
        if token in special
        else TokenType.USER_DEFINED
        if token in plain
        else TokenType.NORMAL
        for token in tokens
    ]
    template = (model / "chat_template.jinja").read_text()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*tokens, *missing],
        "tokenizer.ggml.token_type": [*map(int, kinds), *(int(TokenType.UNUSED) for _ in missing)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in known["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": ids["<|endoftext|>"],
        "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
        "tokenizer.chat_template": template,
    }


def cut(file: Path, size: int) -> Path:
    """The file's first bytes alone; `size` below 0: without so many of the last."""
    file.write_bytes(file.read_bytes()[:size])
    return file


def dequantized(tensor: Tensor, kind: str) -> Tensor:
    """A matrix as it is read after it was stored as `kind`, by llama.cpp's own arithmetic."""
    stored = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(tensor.float().numpy(), stored)
    return torch.from_numpy(gguf.quants.dequantize(packed, stored))
