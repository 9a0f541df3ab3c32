"""Copies of a base model that both engines load, made once before they start."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from langchain_art.errors import ArtError, ConfigError
from langchain_art_server.backends.models.device import default_dtype

#: dtypes of what is written: of weights, or of what layers in 4 bits compute in.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def chosen_dtype(dtype: str | None, device: torch.device, about: str) -> str:
    """`dtype`, or `default_dtype`. Raises ConfigError if it is none of `DTYPES`; says `about`."""
    chosen = dtype or default_dtype(device)
    if chosen not in DTYPES:
        raise ConfigError(f"got dtype={dtype!r} with {about}, expected one of {sorted(DTYPES)}")
    return chosen


def run_copy(name: str, make: Callable[[str, Path, str | None, str | None], Path]) -> None:
    """Make a copy as the command line says; its path is the last line of standard output.

    Args:
        name: of the module that is run.
        make: makes the copy of a model below a folder for a device and a dtype; returns its path.
    """
    parser = argparse.ArgumentParser(prog=f"python -m langchain_art_server.{name}")
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    chosen = parser.parse_args()
    disable_progress_bar()
    try:
        print(make(chosen.model, chosen.folder, chosen.device, chosen.dtype))  # noqa: T201
    except ArtError as error:
        sys.exit(str(error))
