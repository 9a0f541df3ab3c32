"""Ids of the tokens that stand for an image: they say which image it is. No torch.

A vision model has one id for all of them, and takes their embeddings from the image. Here each has
an id of its own, drawn from the image's SHA-256. So wherever equal tokens mean an equal prefix (the
prefix cache, rows, the forest), they do so with images, too: two images differ in all of theirs.
The ids begin far behind every vocabulary and are whole numbers of float64, as JSON has them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import shake_128

IMAGE_IDS = 1 << 52  # the ids of images: from this one on, below twice as many


def image_token_ids(digest: str, count: int) -> list[int]:
    """The ids of an image's tokens, by its SHA-256 in hex."""
    drawn = array("Q", shake_128(digest.encode()).digest(8 * count))
    return [IMAGE_IDS | one >> 12 for one in drawn]


def id_array(ids: Sequence[int]) -> array[int]:
    """Ids in 32 bits each, or in 64 where they have an image's."""
    return array("q" if max(ids, default=0) >= IMAGE_IDS else "i", ids)
