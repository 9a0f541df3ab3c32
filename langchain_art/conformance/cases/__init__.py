"""The topologies, by subject. Packages that few of them need are imported where they are used."""

from __future__ import annotations

import importlib
import pkgutil


def load_cases() -> None:
    """Register all topologies of this package (`harness.TOPOLOGIES`).

    Raises ModuleNotFoundError without the package `langchain`, which most programs need.
    """
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
