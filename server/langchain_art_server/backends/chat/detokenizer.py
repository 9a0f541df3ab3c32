"""Incremental detokenizer: the text of a reply while it is sampled, cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: What an incomplete UTF-8 sequence decodes to.
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Decodes tokens as they are sampled and looks for stop strings.

    Args:
        decode: token ids -> text.
        stop: strings that end the reply; the text before the first one is kept.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: tuple[str, ...] = ()) -> None:
        self._decode, self._stop = decode, tuple(filter(None, stop))
        self._ids: list[int] = []
        self._prefix = self._read = 0
        self._held = ""
        self.stopped = False

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Add tokens; returns the new text that is final.

        Incomplete characters and what may be the beginning of a stop string are held back, unless
        these are the `last` tokens.
        """
        self._ids += ids
        return self._cut(self._new_text(last), last)

    def _new_text(self, last: bool) -> str:
        # Decoded after a few earlier tokens: some tokenizers treat the first token differently.
        before = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        if text.endswith(_INCOMPLETE) and not last:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _cut(self, text: str, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if last else max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if marker.startswith(text[-size:])), 0)
