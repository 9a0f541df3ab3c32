"""Damage to a model's folder: what each function changes on disk, the model then contradicts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import SMALL, tokenizer

Damage = Callable[[Path], object]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Write a file of weights again, with other tensors; `change` may return the new ones."""
    file = min(folder.glob("model*.safetensors"))
    tensors = load_file(file)
    changed = change(tensors)
    tensors = changed if isinstance(changed, dict) else tensors
    save_file({k: t.contiguous() for k, t in tensors.items()}, file, metadata={"format": "pt"})


def change_json(folder: Path, name: str, **fields: Any) -> None:
    """Write a JSON file of the folder again, with other fields."""
    known = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(known | fields))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    return lambda folder: change_tensors(folder, change)


def fields(name: str, **values: Any) -> Damage:
    return lambda folder: change_json(folder, name, **values)


def end_ids(ids: Any) -> Damage:
    """Other ids of tokens that end a reply, in both configs."""

    def both(folder: Path) -> None:
        for name in ("config.json", "generation_config.json"):
            change_json(folder, name, eos_token_id=ids)

    return both


def token_beyond(folder: Path, id_: int = 400) -> None:
    """One more token in the tokenizer, for which the embedding has no row."""
    file = folder / "tokenizer.json"
    known = json.loads(file.read_text())
    known["model"]["vocab"]["<|beyond|>"] = id_
    beyond = {"id": id_, "content": "<|beyond|>"}
    known["added_tokens"].append(known["added_tokens"][0] | beyond)
    file.write_text(json.dumps(known))


def other_model(folder: Path, config: Any, kind: str = "AutoModelForCausalLM") -> None:
    """A random model of another architecture in place of the one that was there."""
    for file in (*folder.glob("*.safetensors*"), *folder.glob("*config.json")):
        file.unlink()
    torch.manual_seed(0)
    getattr(transformers, kind).from_config(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def encoder(folder: Path) -> None:
    sizes = {"num_hidden_layers": 2, "intermediate_size": 64, "hidden_size": 32}
    config = transformers.BertConfig(vocab_size=344, num_attention_heads=4, **sizes)
    other_model(folder, config, "AutoModelForMaskedLM")


def gpt2(folder: Path) -> None:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    other_model(folder, transformers.GPT2Config(vocab_size=344, **sizes, **ends))


def copied(base: Path, folder: Path, *damages: Damage) -> Path:
    """A copy of a folder, damaged."""
    shutil.copytree(base, folder)
    for damage in damages:
        damage(folder)
    return folder


def long_rope(original: int, longest: int) -> dict[str, Any]:
    """Fields of a config whose rotary positions change above `original` tokens."""
    half = SMALL["head_dim"] // 2
    return {
        "max_position_embeddings": longest,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * half,
            "long_factor": [4.0] * half,
            "original_max_position_embeddings": original,
        },
    }
