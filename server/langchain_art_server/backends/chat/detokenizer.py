"""The text of a reply while it grows: decoded piece by piece, cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Characters that an unfinished UTF-8 sequence decodes to.
_UNFINISHED = "\ufffd"


class ReplyText:
    """Decodes tokens as they come and looks for stop strings.

    Args:
        decode: token ids -> text.
        stop: strings that end the reply; the text before the first one is what remains.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: tuple[str, ...] = ()) -> None:
        self._decode, self._stop = decode, tuple(filter(None, stop))
        self._ids: list[int] = []
        self._prefix = self._read = 0
        self._held = ""
        self.stopped = False

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Take more tokens; returns the text that is certain now.

        Held back are unfinished characters and what may be the beginning of a stop string, unless
        it is the `last` piece.
        """
        self._ids += ids
        return self._cut(self._new_text(last), last)

    def _new_text(self, last: bool) -> str:
        # Decoded with a few tokens before them: some tokenizers treat the first one differently.
        before = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        if text.endswith(_UNFINISHED) and not last:
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
        keep = 0
        if not last:
            for stop in self._stop:
                for size in range(min(len(text), len(stop) - 1), keep, -1):
                    if stop.startswith(text[-size:]):
                        keep = size
                        break
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
