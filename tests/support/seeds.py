"""Seeds of the tests that draw: the same ones each time, others where more is to be found.

pytest gives it the test that runs (`tests.conftest`).
"""

import hashlib
import os
import random
import sys

import pytest

from tests.support.soak import share

#: A number: the seed of every test. ``random``: new ones, as in ``make soak``.
VARIABLE = "ART_TEST_SEED"
SEEDS = 10**6
_item: pytest.Item
_drawn: int | None = None


def drawn_seed() -> int:
    """The test's seed, printed: pytest shows what is printed when a test fails.

    The one that ART_TEST_SEED gives; else the one with which it failed last; else a new one, where
    new ones are wanted; else one that its name makes.
    """
    global _drawn
    given, failed = os.environ.get(VARIABLE, ""), _failed()
    if given not in ("", "random"):
        _drawn = int(given)
    elif failed is not None:
        _drawn = failed
    elif explores():
        _drawn = random.SystemRandom().randrange(SEEDS)
    else:
        _drawn = _own()
    print(f"{VARIABLE}={_drawn}")  # noqa: T201 - pytest shows it with a failure
    return _drawn


def explores() -> bool:
    """True if tests are to draw what no run has drawn before."""
    return share() > 0 or os.environ.get(VARIABLE) == "random"


def begin(item: pytest.Item) -> None:
    """A test begins. What draws from `random` or torch without a seed draws the same each time."""
    global _item, _drawn
    _item, _drawn = item, None
    random.seed(_own())
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(_own())


def end(failed: bool) -> None:
    """It has ended. The seed with which it failed is kept until it has passed with that one."""
    if _drawn is not None and (failed or _failed() == _drawn):
        _cache().set(_key(), _drawn if failed else None)


def _failed() -> int | None:
    return _cache().get(_key(), None)


def _cache() -> pytest.Cache:
    assert _item.config.cache is not None
    return _item.config.cache


def _own() -> int:
    return int.from_bytes(hashlib.sha256(_name().encode()).digest()[:8], "big") % SEEDS


def _name() -> str:
    """Its node id, without the group that pytest-xdist adds."""
    return f"{_item.path.relative_to(_item.config.rootpath).as_posix()}::{_item.name}"


def _key() -> str:
    # A file of its own: the processes that run tests side by side write at the same time.
    return f"seeds/{hashlib.sha256(_name().encode()).hexdigest()[:16]}"
