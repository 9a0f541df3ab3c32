"""Public names of a package that load on first use (PEP 562), so that importing it stays light."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """The `__all__`, `__getattr__` and `__dir__` of a package.

    Its names, and the modules that define them, are those of the imports under its first ``if``
    (``if TYPE_CHECKING``), which type checkers read and which never run.
    """
    module = sys.modules[package]
    source = cast(Any, module.__spec__).loader.get_source(package)
    block = next(one for one in ast.parse(source).body if isinstance(one, ast.If))
    imports = [one for one in block.body if isinstance(one, ast.ImportFrom)]
    home = {name.name: one.module or "" for one in imports for name in one.names}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(module, name, value)
        return value

    return list(home), load, lambda: sorted({*vars(module), *home})
