"""Tests of endurance: a part of most by default, the whole in ``make soak``."""

import os

import pytest
from _pytest.mark import ParameterSet

#: 1: the whole; a fraction of 1: that share of it, where there is less time; not set: the part.
VARIABLE = "ART_SOAK"


def share() -> float:
    """Which share of the whole is wanted; 0: the part alone."""
    return float(os.environ.get(VARIABLE, 0))


#: Marks tests that others show the kind of in ``make test``; it implies the mark `soak`.
in_soak = pytest.mark.skipif(not share(), reason="in make soak")


def in_soak_alone(*values: object, id: str | None = None) -> ParameterSet:
    """A test's parameters that run in ``make soak`` alone: others show the kind of it."""
    return pytest.param(*values, id=id, marks=in_soak)


def count(part: int, whole: int) -> int:
    """How often: `part` in ``make test`` and ``make test-vllm``, `whole` in ``make soak``."""
    return max(part, round(share() * whole))
