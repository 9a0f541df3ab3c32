"""Torch's device, its memory and the number of threads, for the sampler and the learner."""

from __future__ import annotations

import os

import torch

from langchain_art.errors import ConfigError


def set_threads(threads: int | None) -> None:
    """Set torch's threads. None: half of the cores that this process may use, at least one."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, cores // 2))


def torch_device(name: str | None) -> torch.device:
    """The device of that name; None: cuda, mps or cpu, whichever torch finds.

    Raises:
        ConfigError: torch cannot use it here.
    """
    if name is None:
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else mps
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"got device={name!r}, which torch cannot use here: {error}") from error
    return device


def free_cache() -> None:
    """Give memory that torch keeps for later back to the GPU, for other processes; else nothing."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
