"""gpt-oss: replies in channels, as OpenAI's harmony format has them.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…``. What is
thought becomes text between ``<think>`` and ``</think>``, as other models write it; a call, whose
header has ``to=functions.name``, becomes ``<|channel|>name<|message|>{…}<|call|>``. Source: the
format's description, https://cookbook.openai.com/articles/openai-harmony. The library
`openai-harmony` reads tokens of one vocabulary only, which it downloads.
"""

from __future__ import annotations

import re

from langchain_art_server.backends.chat.tool_calls.call_format import overlap

MARKERS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
)
_MARK = re.compile("|".join(map(re.escape, MARKERS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
#: What a kind of message ends with once it is rewritten.
_ENDS = {"think": "</think>", "call": "<|call|>", "text": ""}


class HarmonyRewriter:
    """Rewrites one reply; it begins after ``<|start|>assistant``."""

    def __init__(self) -> None:
        self._held = self._header = self._kind = ""

    def push(self, text: str, *, last: bool) -> str:
        """Add text; returns what is final."""
        text = self._held + text
        keep = 0 if last else max(overlap(text, marker) for marker in MARKERS)
        text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        written, at = "", 0
        for mark in _MARK.finditer(text):
            written += self._text(text[at : mark.start()]) + self._mark(mark[0])
            at = mark.end()
        written += self._text(text[at:])
        if last:  # the token that ends a call ends the reply, and is not part of its text
            written += "<|call|>" if self._kind == "call" else self._header
            self._header = ""
        return written

    def _text(self, text: str) -> str:
        if self._kind:
            return text
        self._header += text
        return ""

    def _mark(self, mark: str) -> str:
        if self._kind:  # in a message's body, any mark ends it
            ended, self._kind, self._header = _ENDS[self._kind], "", ""
            return ended
        if mark != "<|message|>":
            self._header = "" if mark in ("<|start|>", "<|end|>") else self._header + mark
            return ""
        header, self._header = self._header, ""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient:
            self._kind = "call"
            return f"<|channel|>{recipient[1]}<|message|>"
        self._kind = "think" if channel and channel[1] == "analysis" else "text"
        return "<think>" if self._kind == "think" else ""
