"""Names, ids, tags and finite numbers, checked; the base class of every value on the wire."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import from_json, to_json

from langchain_art.errors import ConfigError

#: A policy's name: lower case, at most 64 characters, without slashes.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
#: An id that clients choose (trajectories, keys): at most 128 characters; no slash, for URLs.
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,127}")


def is_folder(model: str) -> bool:
    """True if a base model's name can only be a folder's: on the Hub it is NAME or ORG/NAME."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model


def _name(value: str) -> str:
    if not NAME.fullmatch(value) or ".." in value:
        raise ValueError(
            f"got {value!r}, expected a name of 1-64 characters from a-z 0-9 . _ - "
            "that begins with a letter or a digit"
        )
    return value


def _id(value: str) -> str:
    if not ID.fullmatch(value):
        raise ValueError(
            f"got {value[:160]!r}, expected an id of 1-128 characters from "
            "A-Z a-z 0-9 . _ : @ + = -"
        )
    return value


def _number(value: Any) -> Any:
    """NumPy's and torch's numbers as floats; True, "1" and "1_0" are no numbers."""
    if isinstance(value, bool | str | bytes):
        raise ValueError(f"got {value!r}, expected a number")
    try:
        return float(value) if hasattr(value, "__float__") else value
    except OverflowError as error:
        raise ValueError("got an integer that is too large for a float") from error


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(
            f"got {value!r}, expected a finite number; leave it out (null) if there is no score"
        )
    return value


Name = Annotated[str, AfterValidator(_name)]
Id = Annotated[str, AfterValidator(_id)]
Finite = Annotated[float, BeforeValidator(_number), AfterValidator(_finite)]
#: Largest reward, score or weight of one, either way: what is squared and summed over them is far
#: from overflowing in the 32 bits that a learner computes with.
MAX_REWARD = 1e9
RewardValue = Annotated[Finite, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
Tag = Annotated[str, Field(min_length=1, max_length=256)]
#: Without NUL, which PostgreSQL cannot store.
ScenarioName = Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")]
T = TypeVar("T")
#: A tuple, which JSON writes as a list.
Several = Annotated[tuple[T, ...], Strict(False)]
Message = dict[str, Any]
"""A chat message as OpenAI's dialect writes it (``role``, ``content``, ``tool_calls`` …)."""


#: More levels than a request has around a value of it.
_AROUND = 8


def escaped(text: str) -> str:
    """A text whose lone surrogates, which UTF-8 does not have, are written as their escapes."""
    return text.encode(errors="backslashreplace").decode()


def unwritable(value: Any) -> str | None:
    r"""The first place of a value that JSON does not have, and why; None: it has all of it.

    Example::

        unwritable({"files": ["caf\udce9"]})
        # "files[0]: a text with the lone surrogate '\udce9', which UTF-8 does not have"
    """
    why = _json_error(value)
    return None if why is None else _place(value, "", why)


def as_json(value: Any) -> bytes:
    """A value as JSON that a server reads in a request. Raises ValueError or RecursionError."""
    text = to_json(value, fallback=str)
    # An integer, or a value that is nested deep, may be written and not be read again.
    from_json(b"[" * _AROUND + text + b"]" * _AROUND)
    return text


def _json_error(value: Any) -> str | None:
    try:
        as_json(value)
    except (ValueError, RecursionError) as error:  # pydantic's PydanticSerializationError included
        return str(error)
    return None


def _place(value: Any, where: str, why: str, depth: int = 32) -> str:
    items: Iterable[tuple[Any, Any]] = ()
    if depth == 0:  # a value may be in itself
        pass
    elif isinstance(value, BaseModel | Mapping):
        items = [*dict(cast("Mapping[Any, Any]", value)).items()]
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        known = key if isinstance(key, str | int) else type(key).__name__
        inner = f"[{key}]" if isinstance(value, list | tuple) else f".{known}"
        if isinstance(key, str) and (bad := _json_error(key)) is not None:
            return _place(key, where, bad)
        if (bad := _json_error(item)) is not None:
            return _place(item, where + inner, bad, depth - 1)
    if isinstance(value, str):
        lone = next(one for one in value if "\ud800" <= one <= "\udfff")
        why = f"a text with the lone surrogate {lone!r}, which UTF-8 does not have"
    elif isinstance(value, int):
        why = f"an integer of {value.bit_length()} bits, which JSON readers refuse"
    return f"{escaped(where.lstrip('.')) or 'the value'}: {why}"


def scenario_name(text: str) -> str:
    """A text as a scenario's name: of more than 256 characters the first 200, and a hash of all.

    What cannot be stored (NUL, a lone surrogate) is written as its escape.
    """
    text = escaped(text).replace("\0", "\\x00")
    if len(text) <= 256:
        return text
    return f"{text[:200]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def comparable(value: Any) -> Any:
    """The value, with its sets as sorted lists and its arrays as lists; without any, as it is.

    A process has a set in an order of its own, and an array's repr is rounded and abbreviated.
    """
    if isinstance(value, set | frozenset):
        return sorted(map(comparable, cast("set[Any]", value)), key=repr)
    if getattr(value, "shape", ()) and callable(getattr(value, "tolist", None)):
        return comparable(value.tolist())
    if isinstance(value, list | tuple):
        each = [comparable(one) for one in cast("list[Any]", value)]
        return value if all(map(operator.is_, each, cast("list[Any]", value))) else each
    fields: dict[Any, Any] = {}
    if isinstance(value, BaseModel):
        kept = type(value).model_fields
        fields = {k: v for k, v in value if k not in kept or not kept[k].exclude}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        fields = dict(cast("Mapping[Any, Any]", value))
    found = {k: comparable(v) for k, v in fields.items()}
    changed = {k: v for k, v in found.items() if v is not fields[k]}
    if not changed:
        return value
    if isinstance(value, BaseModel) and len(changed) < len(fields):
        return value.model_dump(mode="json", exclude=set(changed)) | changed
    return found


def scenario_id(scenario: Any) -> str:
    """A scenario's name: its ``id``, or a hash of its content that is the same in every run."""
    given: Any = getattr(scenario, "id", None)
    if given is None and isinstance(scenario, Mapping):
        given = scenario.get("id")
    if given is not None and not callable(given):
        return scenario_name(str(given))
    try:
        scenario = comparable(scenario)
        if isinstance(scenario, BaseModel):
            scenario = scenario.model_dump(mode="json")
        elif dataclasses.is_dataclass(scenario) and not isinstance(scenario, type):
            scenario = dataclasses.asdict(scenario)
        text = json.dumps(scenario, sort_keys=True, default=repr)
    except (TypeError, ValueError, RecursionError):
        try:
            text = to_json(scenario, fallback=repr, bytes_mode="base64").decode()
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"A scenario of type {type(scenario).__name__} has no content to name it by: "
                f"{escaped(str(error))}. Give it an attribute (or key) `id`."
            ) from error
    return _digest(text)


def _digest(text: str) -> str:
    if re.search(r" at 0x[0-9a-f]{6,}", text):
        raise ConfigError(
            f"A scenario looks like {text[:120]}, which differs from run to run. Give it an "
            "attribute (or key) `id`."
        )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Frozen(BaseModel):
    """Base of values that are stored or shown: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Wire(Frozen):
    """Base of every value on the wire: frozen, unknown fields refused, no type made to fit.

    ``true`` and ``"1"`` are no numbers, ``1`` is no boolean.
    """

    model_config = ConfigDict(strict=True)
