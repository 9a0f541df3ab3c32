"""The exact ids of sampled text, kept so that a later prompt holds the tokens that were sampled.

A text can often be tokenised in several ways, and a model does not always sample the tokenizer's
own. So the ids of every prompt and reply are kept under a digest of their text.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

#: Token ids that are kept, 4 bytes each.
_MAX_KEPT_IDS = 8_000_000
#: Most replies with the same text that are kept; they differ in the ids of their tool calls.
_SAME_TEXT = 64


@dataclass(frozen=True)
class KeptText:
    """The ids of a text, and the ids of the tool calls in it."""

    ids: array[int]
    call_ids: tuple[str, ...]


class KeptTokens:
    """Cache of texts' tokens; the longest unused ones are forgotten first. Used by several threads.

    Args:
        turn_end: a later text may begin with a kept one that ends before or after such a match.
    """

    def __init__(self, turn_end: re.Pattern[str]) -> None:
        self._turn_end = turn_end
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, list[KeptText]] = OrderedDict()
        self._held = 0

    def beginnings(
        self, text: str, call_ids: tuple[str, ...], tenant: str = ""
    ) -> list[tuple[re.Match[str], bool, KeptText]]:
        """Beginnings of `text` in the cache that were a tenant's own, the longest first.

        Each ends before an end-of-turn token (the reply was cut short), or after it (True).
        """
        if not self._known:
            return []
        digest, at = _digest(tenant), 0
        found: list[tuple[re.Match[str], bool, KeptText]] = []
        for mark in self._turn_end.finditer(text):
            for cut, after in ((mark.start(), False), (mark.end(), True)):
                digest.update(text[at:cut].encode())
                at = cut
                key = digest.digest()
                with self._lock:
                    if same_text := self._known.get(key):
                        self._known.move_to_end(key)
                        found.append((mark, after, _best(same_text, call_ids)))
        return found[::-1]

    def keep(self, text: str, known: KeptText, tenant: str = "") -> None:
        """Keep the ids of a tenant's text."""
        digest = _digest(tenant)
        digest.update(text.encode())
        key = digest.digest()
        with self._lock:
            self._insert(key, known)

    def _insert(self, key: bytes, known: KeptText) -> None:
        same_text = self._known.setdefault(key, [])
        for old in [k for k in same_text if k.call_ids == known.call_ids] or same_text[
            :-_SAME_TEXT
        ]:
            same_text.remove(old)
            self._held -= len(old.ids)
        same_text.append(known)
        self._known.move_to_end(key)
        self._held += len(known.ids)
        while self._held > _MAX_KEPT_IDS:
            _, dropped = self._known.popitem(last=False)
            self._held -= sum(len(k.ids) for k in dropped)


def _digest(tenant: str) -> blake2b:
    """A digest that differs between two tenants for equal texts."""
    return blake2b(digest_size=16, key=tenant.encode())


def _best(same_text: list[KeptText], call_ids: tuple[str, ...]) -> KeptText:
    fits = (k for k in reversed(same_text) if k.call_ids == call_ids[: len(k.call_ids)])
    return next(fits, same_text[-1])
