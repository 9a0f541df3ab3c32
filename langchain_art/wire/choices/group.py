"""The base class of the settings of a choice, and what makes a choice of several."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BeforeValidator, ConfigDict, Field

from langchain_art.wire.field_hints import Options

#: Of a factor and of a bound: products of some of them are far from overflowing in 32 bits.
MAX_FACTOR = 1e6
MAX_COUNT = 2**31 - 1


class Group(Options):
    """Numbers that are not finite are refused too."""

    model_config = ConfigDict(allow_inf_nan=False)

    def model_post_init(self, context: Any, /) -> None:
        """Count `kind` as set, so that JSON without unset fields (as clients send) has it."""
        if "kind" in type(self).model_fields:
            self.model_fields_set.add("kind")


def kinds(choice: Any) -> tuple[str, ...]:
    """The kinds of a union of groups, in the union's order."""
    annotations = (one.model_fields["kind"].annotation for one in get_args(choice))
    return tuple(kind for one in annotations for kind in get_args(one))


def _by_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


#: Decorates a union that is discriminated by `kind`; the string of a kind stands for its defaults.
CHOICE = (Field(discriminator="kind"), BeforeValidator(_by_kind))
