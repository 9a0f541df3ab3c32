"""What mails of the e-mail examples are about, and which of it is held out."""

from __future__ import annotations

import random
from typing import Literal

# fmt: off
PROJECTS = (
    "Falcon", "Raven", "Tulip", "Cedar", "Comet", "Amber", "Delta", "Orchid", "Panda", "Maple",
    "Saturn", "Cobalt", "Willow", "Jasper", "Nimbus", "Quartz", "Otter", "Lotus", "Breeze",
    "Harbor", "Zephyr", "Topaz", "Bison", "Ember",
)
EVENTS = (
    "kickoff", "audit", "demo", "launch", "review", "party", "lunch", "dinner", "training",
    "release", "exam", "tour",
)
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)
SENDERS = (
    "Ana", "Ben", "Chloe", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kim",
    "Lara",
)
# fmt: on
HELD_OUT_SHARE = 0.2

Split = Literal["train", "test"]
Pair = tuple[str, str]


def split_pairs() -> dict[Split, list[Pair]]:
    """Divide all (project, event) pairs into training and held-out ones, always in the same way.

    The division depends on no seed, so that a question held out from one database was held out from
    all of them.
    """
    pairs = [(project, event) for project in PROJECTS for event in EVENTS]
    random.Random("pairs").shuffle(pairs)
    n_test = round(len(pairs) * HELD_OUT_SHARE)
    return {"test": sorted(pairs[:n_test]), "train": sorted(pairs[n_test:])}
