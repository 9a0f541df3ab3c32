"""Identity of a judge across processes: its settings, without memory addresses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from enum import Enum
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from langchain_core.runnables import Runnable
from langchain_core.runnables.config import ensure_config
from pydantic import BaseModel

from langchain_art.evaluators.transcript import compact

#: Fields of LangChain's classes that decide how a call is watched or stored, and not its reply.
_ASIDE = {
    "cache", "callback_manager", "callbacks", "custom_get_token_ids", "metadata", "name",
    "rate_limiter", "tags", "verbose",
}  # fmt: skip


def identity(judge: object) -> str:
    """A digest of a judge's classes and settings.

    Settings are plain values, in any nesting, of models, Runnables and functions (with their code
    and what they close over). Of other objects, such as clients and secrets, only the class counts.
    """
    return hashlib.sha256(compact(_described(judge, ())).encode()).hexdigest()


def configured() -> Any:
    """The values for configurable fields with which the present call was made."""
    given = cast("Mapping[str, Any]", ensure_config().get("configurable") or {})
    return {k: v for k, v in given.items() if isinstance(v, str | int | float)}


def _described(value: Any, within: tuple[int, ...]) -> Any:
    if isinstance(value, Enum | bytes):
        return repr(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if id(value) in within:
        return "…"
    within = (*within, id(value))
    if isinstance(value, Mapping):
        return _fields(cast("Mapping[Any, Any]", value).items(), within)
    if isinstance(value, list | tuple):
        return [_described(one, within) for one in cast("list[Any]", value)]
    if isinstance(value, Set):
        return sorted(compact(_described(one, within)) for one in cast("Set[Any]", value))
    if isinstance(value, FunctionType | MethodType | partial | type):
        return _callable(cast("Any", value), within)
    fields: Iterable[tuple[str, Any]] = ()
    if isinstance(value, BaseModel):
        fields = value
    elif isinstance(value, Runnable):
        fields = vars(cast("Any", value)).items()
    return [_name(type(value)), _fields((f for f in fields if f[0] not in _ASIDE), within)]


def _callable(value: Any, within: tuple[int, ...]) -> Any:
    if isinstance(value, type):
        return _name(value)
    if isinstance(value, FunctionType):
        return _function(value, within)
    if isinstance(value, MethodType):
        return [_described(value.__func__, within), _described(value.__self__, within)]
    return [_described(part, within) for part in (value.func, value.args, value.keywords)]


def _fields(values: Iterable[tuple[Any, Any]], within: tuple[int, ...]) -> dict[str, Any]:
    found = {str(name): _described(value, within) for name, value in values}
    return dict(sorted(found.items()))


def _function(function: FunctionType, within: tuple[int, ...]) -> list[Any]:
    kept: list[Any] = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            kept.append(cell.cell_contents)
    return [_name(function), _code(function.__code__), *(_described(one, within) for one in kept)]


def _code(code: CodeType) -> list[Any]:
    return [code.co_code.hex(), code.co_names, [_constant(one) for one in code.co_consts]]


def _constant(value: object) -> Any:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, frozenset):  # whose order differs from process to process
        return sorted(map(repr, cast("frozenset[Any]", value)))
    return repr(value)


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
