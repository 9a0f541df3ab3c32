"""The messages of a run as JSON texts, redacted; each is written once, whoever sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from langchain_art.wire import Message, Trajectory
from langchain_art.wire.redaction import Redactor

dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode


class MessageTexts:
    """Prompts, replies and tools of a run's turns.

    Args:
        run: whose.
        redactor: counts what it takes out.
        form: of a message where it is sent; None: OpenAI's, as turns have it.
    """

    def __init__(
        self,
        run: Trajectory,
        redactor: Redactor,
        form: Callable[[Message], dict[str, Any]] | None = None,
    ) -> None:
        self._turns = run.turns
        self._redactor = redactor
        self._form = form
        self._prompts: dict[int, list[str]] = {}
        self._replies: dict[int, str | None] = {}
        self._tools: dict[int, tuple[Any, str]] = {}

    def prompt(self, turn: int) -> str:
        """All messages of a turn's prompt: a JSON list."""
        return f"[{','.join(self._prompt(turn))}]"

    def reply(self, turn: int) -> str | None:
        """A turn's reply: a JSON object. None: it gave none."""
        if turn not in self._replies:
            said = self._turns[turn].reply
            self._replies[turn] = None if said is None else self._text(said)
        return self._replies[turn]

    def tools(self, turn: int) -> str | None:
        """The tools that a turn's model was given: a JSON list. None: none."""
        given = self._turns[turn].tools
        if not given:
            return None
        for known, text in self._tools.values():
            if known == given:
                return text
        text = dumps(self._redactor.value(list(given)))
        self._tools[turn] = given, text
        return text

    def _prompt(self, turn: int) -> list[str]:
        if turn not in self._prompts:
            one = self._turns[turn]
            before: list[str] = []
            if one.extends is not None:
                said = self.reply(one.extends)
                before = [*self._prompt(one.extends), *([said] if said is not None else [])]
            self._prompts[turn] = before + [self._text(message) for message in one.messages]
        return self._prompts[turn]

    def _text(self, message: Message) -> str:
        clean = self._redactor.value(message)
        return dumps(clean if self._form is None else self._form(clean))
