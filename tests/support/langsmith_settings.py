"""LangSmith's settings for a test: its SDK reads them once and then keeps them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from langsmith import run_trees
from langsmith.utils import get_env_var


@contextmanager
def langsmith_settings(**values: str) -> Iterator[None]:
    """Variables ``LANGSMITH_…`` and a client that knows no others, for as long as it is open."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(f"LANGSMITH_{name}", value)
        patch.setattr(run_trees, "_CLIENT", None)
        get_env_var.cache_clear()
        try:
            yield
        finally:
            get_env_var.cache_clear()
