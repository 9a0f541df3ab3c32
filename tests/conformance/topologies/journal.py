"""The rule server as the suite sees it: its models, and the engine's journal as the witness."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.conformance.suite.harness import Served
from tests.conformance.suite.witness import Witnessed
from tests.support.live_server import RuleServer


def served_by(server: RuleServer) -> Served:
    return Served(server.base_url, server.policy)


def witnessed(lines: Iterable[dict[str, Any]]) -> dict[str, Witnessed]:
    """call id -> what the journal's lines say."""
    names = ("id", "messages", "prompt_token_ids", "token_ids", "logprobs")
    return {line["id"]: Witnessed(**{name: line[name] for name in names}) for line in lines}


class JournalWitness:
    """What the engine says it was asked and drew."""

    def __init__(self, server: RuleServer) -> None:
        self._server, self._read = server, 0

    def calls(self) -> list[Witnessed]:
        """The calls that ended since it was last asked."""
        lines = self._server.witnessed()[self._read :]
        self._read += len(lines)
        return list(witnessed(lines).values())
