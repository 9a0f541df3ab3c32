"""The source of a function, and of what it names in its own program: what a result depends on.

A result that was stored is only good for the program that made it. So the reward that a rollout
calls, a prompt in a constant and the nodes of a graph count like the rollout itself. Libraries do
not: whatever is installed is taken as it is.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
import sysconfig
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from numbers import Number
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("stdlib", "purelib", "platlib")}
)
#: This package, where it is a checkout.
_OURS = str(Path(__file__).resolve().parents[1])
#: Attributes in which LangChain's and LangGraph's objects keep the functions that they are made of.
_INNER = ("func", "afunc", "coroutine", "bound", "first", "middle", "last", "_tools_by_name")
#: Containers with more are data.
_MOST = 200


def source_of(value: object, name: str) -> dict[str, str]:
    """Digests by name of `value`, called `name`, and of all own code and constants it names.

    A lambda counts by all lambdas of its lines. What has no source text (typed into a prompt, made
    by ``exec``) has an empty digest: a change of it cannot be seen.
    """
    parts: dict[str, str] = {}
    _Reader(parts).read(value, name)
    return parts or {name: ""}


class _Reader:
    def __init__(self, parts: dict[str, str]) -> None:
        self._parts = parts
        self._seen: dict[int, Any] = {}  # kept alive, so that no other object gets its number

    def read(self, value: Any, name: str) -> None:
        if id(value) in self._seen or isinstance(value, str | bytes | int | float | None):
            return
        self._seen[id(value)] = value
        if isinstance(value, partial):
            for key, one in (dict(enumerate(value.args)) | value.keywords).items():
                self._constant(one, f"{name}({key})")
            self.read(value.func, name)
        elif isinstance(value, MethodType):
            owner = cast("type", type(value.__self__))
            own = is_own_module(sys.modules.get(owner.__module__))
            self.read(owner if own else value.__func__, name)
        elif isinstance(value, FunctionType):
            self._function(inspect.unwrap(value), name)
        elif isinstance(value, type):
            self._class(value)
        else:
            self._object(value, name)

    def _function(self, function: FunctionType, name: str) -> None:
        cells = _cells(function)
        if _is_own(function.__code__.co_filename):
            if self._parts and function.__name__ != "<lambda>":
                name = function.__name__
            text = _text(function)
            self._keep(name, text)
            self._names(text, function.__globals__, cells)
            return
        for word, value in cells.items():  # of `create_agent`: tools, middleware and prompt
            if "prompt" in word or "system" in word:
                self._constant(getattr(value, "content", value), word)
            self.read(value, word)

    def _class(self, kind: type) -> None:
        module = sys.modules.get(kind.__module__)
        if is_own_module(module):
            text = _text(kind)
            self._keep(kind.__name__, text)
            cells: dict[str, Any] = {}
            for method in vars(kind).values():
                cells |= _cells(method) if isinstance(method, FunctionType) else {}
            self._names(text, vars(module), cells)

    def _names(self, text: str, scope: Mapping[str, Any], cells: Mapping[str, Any]) -> None:
        """Read what a text names: of its closure, of its module and of other own modules."""
        words = dict.fromkeys(re.findall(r"[^\W\d]\w*", text))
        changed = set(re.findall(r"\w+", " ".join(re.findall(r"(?:global|nonlocal) (.*)", text))))
        for word in words:
            value = cells.get(word, scope.get(word))
            if isinstance(value, ModuleType):
                if is_own_module(value):
                    inner = [one for one in words if one in vars(value)]
                    self._names(" ".join(inner), vars(value), {})
            elif word not in changed and (word.isupper() or isinstance(cells.get(word), Number)):
                self._constant(value, word)
            self.read(value, word)

    def _object(self, value: Any, name: str) -> None:
        """Read a container of functions, a graph, a tool, a chain, or an object of an own class."""
        if isinstance(value, Mapping):
            value = list(cast("Mapping[Any, Any]", value).values())
        if isinstance(value, list | tuple | set | frozenset):
            members = list(cast("list[Any]", value))
            for one in members if len(members) <= _MOST else ():
                if callable(one) or hasattr(one, "func"):
                    self.read(one, name)
            return
        nodes: Any = getattr(getattr(value, "builder", None), "nodes", None)
        if isinstance(nodes, Mapping):
            for node, spec in cast("Mapping[str, Any]", nodes).items():
                self.read(getattr(spec, "runnable", spec), f"node {node}")
        for attribute in _INNER:
            if inspect.getattr_static(value, attribute, None) is not None:
                self.read(getattr(value, attribute, None), name)
        self._class(type(value))

    def _constant(self, value: Any, name: str) -> None:
        """Keep a number, a text, or a tuple of them; the address of a server is none."""
        members = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
        if all(isinstance(one, str | int | float) and "://" not in str(one) for one in members):
            self._keep(name, repr(value))

    def _keep(self, name: str, text: str) -> None:
        digest = text and hashlib.sha256(text.encode()).hexdigest()[:16]
        unique, number = name, 2
        while self._parts.get(unique, digest) != digest:  # of another module, say
            unique, number = f"{name} {number}", number + 1
        self._parts[unique] = digest


def _cells(function: FunctionType) -> dict[str, Any]:
    """The variables of a function's closure that are assigned by now."""
    found: dict[str, Any] = {}
    for word, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            found[word] = cell.cell_contents
    return found


def is_own_module(module: ModuleType | None) -> bool:
    """True if a module is of the program, not of Python, a library or this package."""
    file = getattr(module, "__file__", None)
    if file is None:  # of Python itself, or what was typed into a prompt or a notebook
        return module is not None and module.__name__ == "__main__"
    return _is_own(file)


def _is_own(file: str) -> bool:
    if file.startswith("<frozen"):
        return False
    path = str(Path(file).resolve())
    return not path.startswith((*(f"{root}/" for root in _LIBRARIES), f"{_OURS}/"))


def _text(value: FunctionType | type) -> str:
    """The source without comments and layout; of a lambda, all of its lines' lambdas.

    Empty without source.
    """
    try:
        text = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return ""
    try:
        tree: ast.AST = ast.parse(text)
    except SyntaxError:  # lines of a lambda that are a part of a statement
        return text[text.index("lambda") :]
    if value.__name__ != "<lambda>":
        return ast.unparse(tree)
    return "\n".join(ast.unparse(one) for one in ast.walk(tree) if isinstance(one, ast.Lambda))
