"""Rotary positions (RoPE) that encode every token differently in rows above a length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

#: Kinds of transformers' ``modeling_rope_utils`` whose frequencies follow the longest row.
_KINDS = ("dynamic", "longrope")


def growing_rope(config: Any) -> tuple[str, int] | None:
    """The kind of such a RoPE, and the length in tokens above which it changes.

    None: the model has none.

    Args:
        config: of the text model; it may have a RoPE for each kind of layer.
    """
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(inner for inner in rope.values() if isinstance(inner, Mapping))):
        known = cast("Mapping[str, Any]", one)
        if (kind := known.get("rope_type")) in _KINDS:
            return kind, known.get("original_max_position_embeddings") or (
                config.max_position_embeddings
            )
    return None
