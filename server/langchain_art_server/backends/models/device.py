"""Torch's device, its memory and the number of threads, for the sampler and the learner."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

from langchain_art.errors import ConfigError
from langchain_art.gpu_memory import gpus, half_precision


def set_threads(threads: int | None) -> None:
    """Set torch's threads. None: half of the cores that this process may use, at least one."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, cores // 2))


def torch_device(name: str | None) -> torch.device:
    """The device of that name (None: cuda, mps or cpu). Raises ConfigError: torch cannot use it."""
    if name is None:
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else mps
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
        if device.type == "cuda" and ":" in name:
            torch.cuda.set_device(device)  # some libraries' kernels run on the current one
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"got device={name!r}, which torch cannot use here: {error}") from error
    return device


def default_dtype(device: torch.device) -> str:
    """The dtype of a base on a device, where none is named; CUDA is not initialised."""
    if device.type == "cpu":
        return "float32"
    return half_precision(gpus()) if device.type == "cuda" else "bfloat16"


def free_cache() -> None:
    """Give memory that torch keeps for later back to the GPU, for other processes; else nothing."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> float:
    """Memory that is free for tensors on a device, in bytes; infinite where it is unknown."""
    if device.type == "cuda":
        free: Any = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(psutil.virtual_memory().available if device.type == "cpu" else "inf")
