"""Who sees the calls that a program makes, independently of what was captured of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Witnessed:
    """One completion, as a witness saw it. None: the witness does not see that part."""

    id: str
    messages: list[dict[str, Any]]
    """The prompt, as OpenAI's messages."""
    reply: dict[str, Any] | None = None
    """The answer's message."""
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    """The sampled ids, that of the end included."""
    logprobs: list[float] | None = None
    """Nats, one for each sampled token."""

    @property
    def sampled(self) -> int | None:
        """How many tokens were sampled; None: not seen."""
        known = self.token_ids if self.token_ids is not None else self.logprobs
        return None if known is None else len(known)


class Witness(Protocol):
    """Sees every call between the programs and the model."""

    def calls(self) -> Sequence[Witnessed]:
        """The calls that ended since it was last asked, in the order in which they ended."""
        ...
