"""Seeds that a test draws: printed, so that a failed run can be repeated with the same one."""

from __future__ import annotations

import os
import random

#: Set it to the number that a failed test printed.
VARIABLE = "ART_TEST_SEED"


def drawn_seed() -> int:
    """A new seed, or the one in ART_TEST_SEED. pytest shows what is printed when a test fails."""
    given = os.environ.get(VARIABLE)
    seed = random.SystemRandom().randrange(10**6) if given is None else int(given)
    print(f"{VARIABLE}={seed}")  # noqa: T201 - pytest shows it with a failure
    return seed
