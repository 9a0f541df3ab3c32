"""The topologies, by subject."""

from __future__ import annotations

import importlib
import pkgutil


def load_cases() -> None:
    """Register all topologies of this package (`harness.TOPOLOGIES`)."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
