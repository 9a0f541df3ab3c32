"""Public names of a package that load on first use (PEP 562), so that importing it stays light."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

#: Not `ast`: to import it takes a third of what the whole package takes.
_IMPORT = re.compile(r"^    from (\S+) import (\([^)]*\)|.+)$", re.MULTILINE)
_NAME = re.compile(r"\w+ as (\w+)")


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """The `__all__`, `__getattr__` and `__dir__` of a package.

    Its names, and the modules that define them, are those of its indented imports ``A as A``, which
    stand under ``if TYPE_CHECKING``: type checkers read them, and they never run.
    """
    module = sys.modules[package]
    loader = cast(Any, module.__spec__).loader
    source = loader.get_data(module.__file__).decode()
    home = {
        name: where for where, names in _IMPORT.findall(source) for name in _NAME.findall(names)
    }

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(module, name, value)
        return value

    return list(home), load, lambda: sorted({*vars(module), *home})
