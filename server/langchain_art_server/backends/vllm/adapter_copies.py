"""Adapters on their way into vLLM: checked, then copied to a place that nobody else knows.

vLLM takes much in silence that is wrong: tensors of another shape are copied in part, layers that
it does not adapt are left out, NaN spoils other adapters' cached keys and values, and an adapter
whose directory is gone when it is read again ends the whole server. So each one is read and checked
here, and vLLM sees a copy under a name and a path that are used once, and removed after its last
call.
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
from safetensors.torch import save_file

from langchain_art.errors import ConfigError
from langchain_art_server.backends.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from langchain_art_server.backends.models.adapter_reader import linear_layers, read_adapter

#: Ranks that vLLM makes room for.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_SHARED_MEMORY = Path("/dev/shm")
#: Adapters that must find room in shared memory, or they go to disk.
_EXPECTED = 16
#: Multiplied into its neighbours when vLLM loads latent attention, so LoRA on it has no effect.
_ABSORBED = "kv_b_proj"


@dataclass(eq=False)
class Loaded:
    """An adapter that vLLM has.

    Attributes:
        name: what requests call it.
        path: the directory that was published.
        inner: its name inside of vLLM, used once.
        folder: the copy that vLLM reads.
        moves: its B is not all zero, so it must change logprobs.
        users: calls that run on it.
        retired: it was unloaded and goes when `users` is 0.
    """

    name: str
    path: Path
    inner: str
    folder: Path
    moves: bool
    users: int = 0
    retired: bool = False


class Shelf:
    """Checks adapters of one model and keeps the copies.

    Args:
        model: of transformers, on torch's ``meta`` device.
        max_rank: the highest rank that vLLM must make room for.
        dtype: torch's name of the type that vLLM computes in.

    Attributes:
        targets: the last parts of the names of the layers that adapters may have.
        max_rank: the rank that vLLM is to be started with.
        folder: of this user only; for the copies, and for vLLM's socket.
    """

    def __init__(self, model: Any, max_rank: int, dtype: str) -> None:
        self._largest: float = torch.finfo(getattr(torch, dtype)).max
        self._dtype = dtype
        head = model.get_output_embeddings()
        self._all_linears = linear_layers(model)
        # The head is left out: under its adapters vLLM dies, or leaves them out of its logprobs.
        self._linears = {
            name: module
            for name, module in self._all_linears.items()
            if module is not head and name.rpartition(".")[2] != _ABSORBED
        }
        self._modules = set(self._linears)
        self.targets = sorted({name.rpartition(".")[2] for name in self._modules})
        self.max_rank = next((rank for rank in RANKS if rank >= max_rank), RANKS[-1])
        sizes = sum(m.in_features + m.out_features for m in self._linears.values())
        self.folder = _folder(_EXPECTED * self.max_rank * sizes * 4)
        self._numbers = itertools.count(1)

    def put(self, name: str, path: Path) -> Loaded:
        """Check an adapter and copy it.

        Raises:
            ConfigError: see `read_adapter`; or its rank or a layer is not one of vLLM's.
        """
        pairs = read_adapter(path, self._all_linears).pairs
        rank = max(down.shape[0] for down, _ in pairs.values())
        if rank > self.max_rank:
            raise ConfigError(
                f"{path}: got rank {rank}, expected at most {self.max_rank}. Start the server with "
                f"[sampler] max_rank = {rank}."
            )
        if others := sorted(set(pairs) - self._modules):
            raise ConfigError(
                f"{path}: got an adapter of {others[0]}, which vLLM does not apply; expected "
                f"layers named {self.targets}."
            )
        if any(part.abs().max() > self._largest for pair in pairs.values() for part in pair):
            raise ConfigError(f"{path} holds numbers that are not finite in {self._dtype}.")
        inner = f"{name}/{next(self._numbers)}"
        folder = Path(tempfile.mkdtemp(prefix="adapter-", dir=self.folder))
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            shutil.copyfile(path / file, folder / file)
        return Loaded(name, path, inner, folder, any(bool(up.any()) for _, up in pairs.values()))

    def nothing(self) -> Path:
        """An adapter that changes nothing: zeros, of rank 1, on one layer."""
        name, layer = sorted(self._linears.items())[0]
        folder = Path(tempfile.mkdtemp(prefix="nothing-", dir=self.folder))
        config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "bias": "none"}
        config |= {"target_modules": [name.rpartition(".")[2]], "base_model_name_or_path": None}
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        weights = {
            f"base_model.model.{name}.lora_A.weight": torch.zeros(1, layer.in_features),
            f"base_model.model.{name}.lora_B.weight": torch.zeros(layer.out_features, 1),
        }
        save_file(weights, folder / WEIGHTS_FILE)
        return folder

    def drop(self, loaded: Loaded) -> None:
        """Remove the copy of an adapter that vLLM will never read again."""
        shutil.rmtree(loaded.folder)


def _folder(size: int) -> Path:
    """A new folder that only this user can enter, in shared memory if `size` bytes fit there."""
    root: Any = None
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > size:
        root = _SHARED_MEMORY
    return Path(tempfile.mkdtemp(prefix="langchain-art-", dir=root))
