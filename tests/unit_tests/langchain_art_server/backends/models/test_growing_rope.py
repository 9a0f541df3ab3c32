from types import SimpleNamespace
from typing import Any

import pytest

from langchain_art_server.backends.models.base_weights import growing_rope

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, None),
        ({}, None),
        ({"rope_type": "llama3", "factor": 8.0}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, ("dynamic", 64)),
        (LONG, ("longrope", 16)),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": LONG}, ("longrope", 16)),
    ],
)
def test_the_kind_and_the_length(rope: Any, expected: tuple[str, int] | None) -> None:
    config = SimpleNamespace(rope_parameters=rope, max_position_embeddings=64)
    assert growing_rope(config) == expected
    assert growing_rope(SimpleNamespace(max_position_embeddings=64)) is None
