"""Names, ids, tags and finite numbers, checked; the base class of every value on the wire."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

#: A policy's name: lower case, at most 64 characters, without slashes.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
#: An id that clients choose (trajectories, keys): at most 128 characters; no slash, for URLs.
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,127}")


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


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(
            f"got {value!r}, expected a finite number; leave it out (null) if there is no score"
        )
    return value


Name = Annotated[str, AfterValidator(_name)]
Id = Annotated[str, AfterValidator(_id)]
Finite = Annotated[float, AfterValidator(_finite)]
Tag = Annotated[str, Field(min_length=1, max_length=256)]
Message = dict[str, Any]
"""A chat message as OpenAI's dialect writes it (``role``, ``content``, ``tool_calls`` …)."""


class Wire(BaseModel):
    """Base of every value on the wire: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
