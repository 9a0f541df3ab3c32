"""Checks adapters before vLLM loads them, and keeps the copies that vLLM reads.

vLLM does not report many errors: tensors of another shape are copied in part, layers that it does
not adapt are left out, NaN spoils other adapters' KV cache, and an adapter whose directory is gone
when it is read again ends the whole server. So each adapter is checked here, and vLLM reads a copy
under a name and a path that are used once; the copy is removed after its last call.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from langchain_art.errors import ConfigError
from langchain_art_server.backends.models.adapter_files import (
    ABSORBED,
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoadedAdapter,
)
from langchain_art_server.backends.models.adapter_reader import linear_layers, read_adapter

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM can be started with
_SHARED_MEMORY = Path("/dev/shm")
_EXPECTED = 16  # copies go to shared memory if it has room for so many


@dataclass(eq=False, kw_only=True)
class CopiedAdapter(LoadedAdapter):
    """An adapter that vLLM has loaded, from the copy in `folder`."""

    vllm_name: str  # used once
    folder: Path
    has_effect: bool  # true if its B is not all zero, so it must change logprobs


class AdapterCopies:
    """The checked copies of the adapters of a model, which may be on torch's ``meta`` device.

    Attributes:
        targets: last parts of the names of the layers that adapters may have.
        max_rank: the rank that vLLM is to be started with.
        folder: for the copies and vLLM's socket; only this user can enter it.
    """

    def __init__(self, model: Any, max_rank: int, dtype: str) -> None:
        self._dtype = dtype
        head = model.get_output_embeddings()
        self._all_linears = linear_layers(model)
        # Not the head: with an adapter on it, vLLM ends or leaves it out of its logprobs.
        self._linears = {
            name: module
            for name, module in self._all_linears.items()
            if module is not head and name.rpartition(".")[2] not in ABSORBED
        }
        self.targets = sorted({name.rpartition(".")[2] for name in self._linears})
        self.max_rank = next((rank for rank in RANKS if rank >= max_rank), RANKS[-1])
        sizes = sum(m.in_features + m.out_features for m in self._linears.values())
        shared = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        if shared and shutil.disk_usage(shared).free <= _EXPECTED * self.max_rank * sizes * 4:
            shared = None
        self.folder = Path(tempfile.mkdtemp(prefix="langchain-art-", dir=shared))
        self._numbers = itertools.count(1)

    def add(self, name: str, path: Path) -> CopiedAdapter:
        """Check an adapter and copy it.

        Raises ConfigError: see `read_adapter`; vLLM can not apply its rank or one of its layers; or
        it was moved meanwhile.
        """
        pairs = read_adapter(path, self._all_linears).pairs
        rank = max(down.shape[0] for down, _ in pairs.values())
        if rank > self.max_rank:
            raise ConfigError(
                f"{path}: got rank {rank}, expected at most {self.max_rank}. Start the server with "
                f"[sampler] max_rank = {rank}."
            )
        if others := sorted(pairs.keys() - self._linears.keys()):
            raise ConfigError(
                f"{path}: got an adapter of {others[0]}, which vLLM does not apply; expected "
                f"layers named {self.targets}."
            )
        largest = torch.finfo(getattr(torch, self._dtype)).max
        if any(part.abs().max() > largest for pair in pairs.values() for part in pair):
            raise ConfigError(f"{path} holds numbers that are not finite in {self._dtype}.")
        folder = Path(tempfile.mkdtemp(prefix="adapter-", dir=self.folder))
        try:
            shutil.copyfile(path / CONFIG_FILE, folder / CONFIG_FILE)
            if self._dtype == "float32":
                shutil.copyfile(path / WEIGHTS_FILE, folder / WEIGHTS_FILE)
            else:  # in 16 bits, as vLLM will round them: half as much is written and read
                parts, dtype = load_file(path / WEIGHTS_FILE), getattr(torch, self._dtype)
                rounded = {name: part.to(dtype) for name, part in parts.items()}
                save_file(rounded, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"{path} can not be copied to {folder}: {error}") from error
        return CopiedAdapter(
            name=name,
            path=path,
            vllm_name=f"{name}/{next(self._numbers)}",
            folder=folder,
            has_effect=any(bool(up.any()) for _, up in pairs.values()),
        )

    def zero_adapter(self) -> Path:
        """The folder of an adapter that changes nothing: zeros, of rank 1, on one layer."""
        name, layer = sorted(self._linears.items())[0]
        folder = Path(tempfile.mkdtemp(prefix="zero-", dir=self.folder))
        config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "bias": "none"}
        config |= {"target_modules": [name.rpartition(".")[2]], "base_model_name_or_path": None}
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        weights = {
            f"base_model.model.{name}.lora_A.weight": torch.zeros(1, layer.in_features),
            f"base_model.model.{name}.lora_B.weight": torch.zeros(layer.out_features, 1),
        }
        save_file(weights, folder / WEIGHTS_FILE)
        return folder

    def remove(self, adapter: CopiedAdapter) -> None:
        """Remove the copy of an adapter that vLLM will not read again."""
        shutil.rmtree(adapter.folder)
