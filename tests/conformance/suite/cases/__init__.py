"""The topologies, by subject."""

from __future__ import annotations

import importlib
import pkgutil

from tests.conformance.suite.harness import TOPOLOGIES


def load_cases() -> None:
    """Register all topologies of this package (`harness.TOPOLOGIES`), in one order.

    The order is by module, whichever of them other tests imported before.
    """
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    cases = sorted(TOPOLOGIES.items(), key=lambda item: item[1].program.__module__)
    TOPOLOGIES.clear()
    TOPOLOGIES.update(cases)
