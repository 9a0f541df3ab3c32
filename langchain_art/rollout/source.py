"""The source of a function, and of what it names in its own program: what a result depends on.

A result that was stored is only good for the program that made it. So the reward that a rollout
calls, a prompt in a constant and the nodes of a graph count like the rollout itself. Libraries do
not: whatever is installed is taken as it is.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
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
    """By name: digests of `value`, called `name`, and of all own code and constants it names.

    A function without source text (typed into a prompt, made by ``exec``) and a lambda, whose lines
    hold more than itself, count by their byte code. What has neither is under its name with an
    empty digest: a change of it cannot be seen.
    """
    reader = _Reader()
    if not reader.read(value, name):
        reader.parts.setdefault(name, "")
    return reader.parts


class _Reader:
    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self._seen: dict[int, Any] = {}  # kept alive, so that no other object gets its number

    def read(self, value: Any, name: str) -> bool:
        """Whether something of `value` was read."""
        if id(value) in self._seen:
            return True
        self._seen[id(value)] = value
        if isinstance(value, partial):
            given = dict(enumerate(value.args)) | value.keywords
            for key, one in given.items():
                self._constant(one, f"{name}({key})")
            return self.read(value.func, name)
        if isinstance(value, MethodType):
            return self.read(type(value.__self__), name) or self.read(value.__func__, name)
        if callable(value) and hasattr(value, "__wrapped__"):
            value = inspect.unwrap(value)
        if isinstance(value, FunctionType):
            return self._function(value, name)
        if isinstance(value, type):
            return self._class(value, name)
        return self._object(value, name)

    def _function(self, function: FunctionType, name: str) -> bool:
        if not _is_own(function.__code__.co_filename):
            return self._library(function)
        if self.parts and function.__name__ != "<lambda>":
            name = function.__name__
        self._keep(name, _text(function) or _byte_code(function.__code__))
        for code in _codes(function.__code__):
            changed = _assigned(code)
            for word in code.co_names:
                if word in function.__globals__:
                    self._named(function.__globals__[word], word, code, changed)
        for word, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if isinstance(value, int | float) and word not in _assigned(function.__code__):
                self._constant(value, word)
            else:
                self.read(value, word)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not isinstance(default, str | int | float | None):
                self.read(default, name)
        return True

    def _library(self, function: FunctionType) -> bool:
        """What a library's function was given: of `create_agent`, tools, middleware and prompt."""
        found, cells = False, function.__closure__ or ()
        for word, cell in zip(function.__code__.co_freevars, cells, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            text = getattr(value, "content", value)  # of a message
            if ("prompt" in word or "system" in word) and isinstance(text, str):
                found |= self._constant(text, word)
            else:
                found |= self.read(value, word)
        return found

    def _named(self, value: Any, word: str, code: CodeType, changed: set[str]) -> None:
        """A global of the program that a function names."""
        if isinstance(value, ModuleType):
            if is_own_module(value):
                for attribute in code.co_names:
                    if attribute in vars(value):
                        self._named(vars(value)[attribute], attribute, code, changed)
        elif word.isupper() and word not in changed and self._constant(value, word):
            return
        else:
            self.read(value, word)

    def _class(self, kind: type, name: str) -> bool:
        if not is_own_module(sys.modules.get(kind.__module__)):
            return False
        methods = [one for one in vars(kind).values() if isinstance(one, FunctionType)]
        self._keep(kind.__name__, _text(kind) or "".join(_byte_code(m.__code__) for m in methods))
        for base in kind.__bases__:
            self.read(base, base.__name__)
        for method in methods:
            for code in _codes(method.__code__):
                for word in code.co_names:
                    if word in method.__globals__:
                        self._named(method.__globals__[word], word, code, set())
        return True

    def _object(self, value: Any, name: str) -> bool:
        """A container of functions, a graph, a tool, a chain, or an object of an own class."""
        found = False
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            members = (
                cast("Mapping[Any, Any]", value).values() if isinstance(value, Mapping) else value
            )
            if len(cast("Sequence[Any]", value)) > _MOST:
                return False
            for one in list(members):
                if callable(one) or hasattr(one, "func"):
                    found |= self.read(one, name)
            return found
        if isinstance(value, str | bytes | int | float | None):
            return False
        nodes: Any = getattr(getattr(value, "builder", None), "nodes", None)
        if isinstance(nodes, Mapping):
            for node, spec in cast("Mapping[str, Any]", nodes).items():
                found |= self.read(getattr(spec, "runnable", spec), f"node {node}")
        for attribute in _INNER:
            inner = inspect.getattr_static(value, attribute, None)
            inner = getattr(value, attribute, None) if inner is not None else None
            if inner is not None and not isinstance(inner, str):
                found |= self.read(inner, name)
        return self._class(type(value), name) or found

    def _constant(self, value: Any, name: str) -> bool:
        """Keeps a number, a text, or a tuple of them; the address of a server is none."""
        members = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
        if not all(isinstance(one, str | int | float) and "://" not in str(one) for one in members):
            return False
        self._keep(name, repr(value))
        return True

    def _keep(self, name: str, text: str) -> None:
        digest, unique, number = hashlib.sha256(text.encode()).hexdigest()[:16], name, 2
        while self.parts.get(unique, digest) != digest:  # of another module, say
            unique, number = f"{name} {number}", number + 1
        self.parts[unique] = digest


def is_own_module(module: ModuleType | None) -> bool:
    """Whether a module is of the program, not of Python, a library or this package."""
    file = getattr(module, "__file__", None)
    if file is None:  # of Python itself, or what was typed into a prompt or a notebook
        return module is not None and module.__name__ == "__main__"
    return _is_own(file)


def _is_own(file: str) -> bool:
    if file.startswith("<frozen"):
        return False
    path = str(Path(file).resolve())
    return not path.startswith((*(f"{root}/" for root in _LIBRARIES), f"{_OURS}/"))


def _text(value: FunctionType | type) -> str | None:
    """The source without comments and layout; None where there is none of exactly this."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    except (OSError, TypeError, SyntaxError):
        return None
    if len(tree.body) != 1 or not hasattr(tree.body[0], "name"):
        return None  # a lambda's lines
    return ast.unparse(tree)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _byte_code(code: CodeType) -> str:
    consts = [_byte_code(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return repr((code.co_code, code.co_names, code.co_varnames, consts))


def _assigned(code: CodeType) -> set[str]:
    """Names outside of a function to which it assigns: a counter, and no constant."""
    stores = ("STORE_DEREF", "STORE_GLOBAL")
    return {
        str(one.argval)
        for inner in _codes(code)
        for one in dis.get_instructions(inner)
        if one.opname in stores
    }
