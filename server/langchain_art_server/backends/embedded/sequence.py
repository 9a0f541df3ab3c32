"""One reply while it is sampled, and what waits to become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from langchain_art.errors import ArtError, InvalidRequest
from langchain_art_server.backends.base import FinishReason
from langchain_art_server.backends.embedded.multi_lora import RoutedAdapter
from langchain_art_server.backends.embedded.token_sampler import SamplingState


class Queued(Protocol):
    """Item of the scheduler's queue: a call, or a sequence that was sent back to wait."""

    @property
    def client(self) -> str:
        """Client that asked."""
        ...

    @property
    def cancelled(self) -> Callable[[], bool]:
        """Asked at every step."""
        ...

    def prepare(self) -> SequenceState | None:
        """The sequence, when there is room for it; None: there is none, and the caller knows."""
        ...


@dataclass(eq=False)
class SequenceState:
    """One reply while it is sampled.

    Attributes:
        client: whose call it is; clients share the engine.
        prompt: token ids of the prompt.
        limit: most tokens of the reply, at least 1.
        sampling: how they are sampled.
        adapter: whose weights; None for the base model.
        base_root: of the prefix cache's blocks of the base model; each tenant has its own.
        on_token: gets each token that does not end the reply; True ends it (a stop string).
        cancelled: asked at every step.
        out: token ids of the reply so far, with their `logprobs` and, if asked for, `top` logprobs.
        finish: why it ended; None if it runs or was cancelled.
        error: why it leaves without a reply.
        filled: tokens whose keys and values are in the KV cache.
        leader: a running sequence with the same prefix, whose prefill this one waits for.
    """

    prompt: list[int]
    limit: int
    sampling: SamplingState
    client: str = ""
    adapter: RoutedAdapter | None = None
    base_root: int = 0
    on_token: Callable[[int], bool] | None = None
    cancelled: Callable[[], bool] = bool
    out: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    finish: FinishReason | None = None
    error: Exception | None = None
    filled: int = 0
    leader: SequenceState | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and reply so far."""
        return self.prompt + self.out if self.out else self.prompt

    @property
    def length(self) -> int:
        """Length of `tokens`."""
        return len(self.prompt) + len(self.out)

    @property
    def root(self) -> int:
        """Root of the prefix cache's blocks that it may use."""
        return self.adapter.root if self.adapter else self.base_root

    def prepare(self) -> SequenceState:
        """See `Queued`."""
        return self

    def failure(self) -> ArtError:
        """Error for which a token could not be sampled."""
        processor = self.sampling.logits_processor
        if processor and processor.error:
            return InvalidRequest(
                "The schema allows no reply: its grammar has no next token "
                f"({processor.error.splitlines()[0][:200]})",
                param="response_format",
            )
        return ArtError(
            "The model gave logits that are not finite. Its weights, or the adapter's, have "
            "diverged; go back to an earlier version."
        )
