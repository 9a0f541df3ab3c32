"""Cuts tool calls out of replies while they are streamed, in any of `FORMATS`.

The arguments keep the model's own text where the format is JSON, so that a history with them
renders as it was sampled. A malformed call stays text.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from langchain_art_server.backends.base import ChatDelta
from langchain_art_server.backends.chat.tool_calls.call_format import (
    FunctionCall,
    ToolFormat,
    overlap,
)


class ToolCallParser:
    """Splits a reply into text and tool calls while it is streamed.

    The sizes of the pieces do not matter: the deltas of `feed` together are the same.
    White space next to a call is dropped; text that may be the beginning of a call is held back.

    Args:
        form: how the model writes; None: all is text.
        calls: False: calls stay text.
        tools: the request's, as OpenAI writes them. Their schemas tell a string from another value
            where the format does not.
        one_call: further calls after the first are left out of the reply.
        ids: draws the ids of calls.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        tools: Sequence[dict[str, Any]] = (),
        *,
        calls: bool = True,
        one_call: bool = False,
        ids: Random | None = None,
    ) -> None:
        self._form, self._one_call = form if calls else None, one_call
        self._ids = ids or Random()
        functions = [tool["function"] for tool in tools]
        self._schemas = {f["name"]: f.get("parameters") or {} for f in functions}
        self._rewriter = form.rewriter() if form and form.rewriter else None
        self._buffer = self._space = ""
        self._after_call = self._has_text = False
        self.calls: list[dict[str, Any]] = []
        self.content = ""

    def feed(self, text: str, *, last: bool = False) -> ChatDelta:
        """Add text, the `last` of which ends the reply; returns text and calls that are final."""
        content, calls = len(self.content), len(self.calls)
        if self._rewriter is not None:
            text = self._rewriter.push(text, last=last)
        if self._form is None:
            self.content += text
        else:
            self._buffer += text
            self._scan(self._form)
            if last:
                self._end(self._form)
        return ChatDelta(self.content[content:], self.calls[calls:])

    def _end(self, form: ToolFormat) -> None:
        """Take what was held back."""
        rest, self._buffer = self._buffer, ""
        whole = not form.closer and rest.startswith(form.opener)
        if found := form.calls(rest[len(form.opener) :], self._schemas) if whole else []:
            self._add_calls(form, found)
        elif rest:
            self._add_text(rest)
        if not self._after_call:
            self.content += self._space

    def _scan(self, form: ToolFormat) -> None:
        if not form.opener:
            start = self._buffer.lstrip()
            begins = any(start.startswith(mark[: len(start)]) for mark in form.starts)
            if self._has_text or not begins:
                self._add_text(self._buffer)
                self._buffer = ""
            return
        while True:
            at = self._buffer.find(form.opener)
            cut = at if at >= 0 else len(self._buffer) - overlap(self._buffer, form.opener)
            self._add_text(self._buffer[:cut])
            self._buffer = self._buffer[cut:]
            if at < 0 or (end := form.end_of_call(self._buffer)) < 0:
                return
            call, self._buffer = self._buffer[:end], self._buffer[end:]
            if found := form.calls(call[len(form.opener) : -len(form.closer)], self._schemas):
                self._add_calls(form, found)
            else:
                self._add_text(call)

    def _add_text(self, text: str) -> None:
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._has_text = True
            self.content += "\n" + body if self._after_call and self.content else body
            self._after_call = False

    def _add_calls(self, form: ToolFormat, calls: list[FunctionCall]) -> None:
        self._space, self._after_call = "", True
        for call in calls:
            if self.calls and self._one_call:
                return
            function = {"name": call.name, "arguments": call.arguments}
            taken = {one["id"] for one in self.calls}
            id_ = call.id if call.id and call.id not in taken else form.new_id(self._ids)
            self.calls.append({"id": id_, "type": "function", "function": function})
