"""The real vLLM, on a CPU, for tests: where it is, what it runs, and which processes it has."""

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.engines import alive, children
from tests.support.environments import vllm_python
from tests.support.live_server import BASE_MODEL

HEAD, WIDE = 16, 32


def vllm_table(**changes: Any) -> dict[str, Any]:
    """The table ``[sampler]`` for vLLM, small."""
    small = {"threads": 1, "kv_cache_bytes": 256 << 20, "max_rank": 16}
    return {"kind": "vllm", "python": str(vllm_python())} | small | changes


def vllm_toml(path: Path, table: dict[str, Any] | None = None, **top: Any) -> Path:
    """The same as a file of settings; `table` are changes of it, `top` settings beside it."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in top.items()] + ["[sampler]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in vllm_table(**table or {}).items()]
    path.write_text("\n".join([*lines, ""]))
    return path


def wide_model(out: Path, base: Path = BASE_MODEL, **config: Any) -> Path:
    """The e-mail example's model with heads of 32 dimensions, the fewest that vLLM has on a CPU.

    The same function: each head's 16 dimensions are put where the rotary embedding turns 32 with
    the same frequencies (pair j of 8 becomes pair 2j of 16), and the rest is zero. The keys' norm
    takes up that the mean square is half and that attention divides by sqrt(32).
    """
    shutil.copytree(base, out)
    told = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(told | {"head_dim": WIDE} | config))
    place = torch.tensor([2 * (i % 8) + WIDE // 2 * (i // 8) for i in range(HEAD)])
    tensors = load_file(out / "model.safetensors")
    for name, old in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            new = torch.zeros(old.shape[0] // HEAD, WIDE, old.shape[1])
            new[:, place] = old.view(-1, HEAD, old.shape[1])
            tensors[name] = new.reshape(-1, old.shape[1])
        elif name.endswith("o_proj.weight"):
            new = torch.zeros(old.shape[0], old.shape[1] // HEAD, WIDE)
            new[:, :, place] = old.view(old.shape[0], -1, HEAD)
            tensors[name] = new.reshape(old.shape[0], -1)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            new = torch.zeros(WIDE)
            new[place] = old * (0.5**0.5 if "k_norm" in name else 1.0)
            tensors[name] = new
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def command(pid: int) -> list[str]:
    """A process's command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def guard_of(pid: int) -> int:
    """The guard among the descendants of a server, or of a sampler's process."""
    return guards_of(pid)[0]


def guards_of(pid: int) -> list[int]:
    """The guards of a server's replicas."""
    return [p for p in children(pid) if any("process_guard" in part for part in command(p))]


def vllm_of(pid: int) -> list[int]:
    """vLLM's own processes under a guard: the API server, its engine, its worker."""
    return children(guard_of(pid))


def shared_memory(pids: list[int]) -> set[Path]:
    """The pieces of shared memory and semaphores of Python's that processes have mapped."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {Path(line.split()[-1]) for line in lines if "/dev/shm/" in line}
    return {path for path in found if path.name.startswith(("psm_", "sem.mp-"))}


def gone(pids: list[int], seconds: float = 15) -> bool:
    """Whether all of them end within `seconds`. A zombie has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False
