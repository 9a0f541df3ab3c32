"""What the random policies of both e-mail examples have in common."""

from __future__ import annotations

import random
import re
from typing import Any

from examples.support.mail_words import MONTHS

Message = dict[str, Any]
_DATE = re.compile(rf"\d+ (?:{'|'.join(MONTHS)})")


class MailPlayer:
    """Plays a question with well-formed calls and keeps the messages in OpenAI's shape.

    Attributes:
        messages: The conversation.
        answer: What was answered; "" before.
    """

    def __init__(self, rng: random.Random, system_prompt: str, question: str) -> None:
        """Start a conversation with the system prompt and the question."""
        self._rng = rng
        self._dates: list[str] = []
        self.answer = ""
        self.messages: list[Message] = [
            {"role": "system", "content": system_prompt},
            {"role": "user", "content": question},
        ]

    def _call(self, name: str, arguments: dict[str, Any], result: str) -> None:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result},
        ]

    def _open(self, name: str, arguments: dict[str, Any], mail: str) -> None:
        """Open a mail, whose dates are what may be answered."""
        self._dates = _DATE.findall(mail)
        self._call(name, arguments, mail)

    def _answer(self) -> None:
        date = f"{self._rng.randint(1, 28)} {self._rng.choice(MONTHS)}"
        self.answer = self._rng.choice(self._dates) if self._dates else date
        self._call("answer", {"text": self.answer}, self.answer)
        self.messages.pop()
