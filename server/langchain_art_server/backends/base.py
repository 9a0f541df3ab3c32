"""What a backend is: a `Sampler` that talks and a `Learner` that learns. Two small protocols.

Everything above this file sees only these. An adapter is an immutable directory in PEFT's format
(``adapter_config.json``, ``adapter_model.safetensors``) with a name that is used once
(``email-agent@17``); samplers cache by name, learners start from a directory and write another.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from langchain_art.wire import JobConfig, LoraConfig
from langchain_art_server.algorithms.sequences.training_rows import Row

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class ModelInfo:
    """The base model as the engine loaded it."""

    name: str
    """The name it is served under."""
    path: str
    """Hub name or local path."""
    parameters: int
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    """Size of the logits: every token id is below it."""


@dataclass(frozen=True)
class Sampling:
    """How one completion is drawn.

    `logprobs` of a reply are those of the distribution that was sampled: log-softmax of
    logits / temperature. The learner applies the same temperature. Truncation (`top_p` < 1,
    `top_k` > 0), greedy decoding (temperature 0) and grammars change the distribution in ways that
    the learner does not repeat, so such calls are recorded as not trainable.
    """

    max_tokens: int | None = None
    """None: as many as the context has room for."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True)
class ChatRequest:
    """One completion to be sampled. `messages` and `tools` are OpenAI's, already checked."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    """``auto``, ``none``, ``required`` or ``{"type": "function", "function": {"name": …}}``."""
    parallel_tool_calls: bool = True
    """False: at most the first of a reply's tool calls counts."""
    response_format: dict[str, Any] | None = None
    """OpenAI's ``json_schema`` or ``json_object``."""
    adapter: str | None = None
    """Name of a loaded adapter; None is the base model."""
    sampling: Sampling = Sampling()
    stream: bool = False


@dataclass(frozen=True)
class ChatDelta:
    """A piece of a streamed reply, in OpenAI's shape: text or whole tool calls."""

    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class ChatReply:
    """A finished completion.

    Attributes:
        prompt_token_ids: what the model was shown.
        token_ids: what it said, the end-of-turn token included.
        logprobs: one float per token id, under the distribution that was sampled.
        top_logprobs: per token, ``[(token_id, logprob), …]``; empty unless asked for.
        content: the text beside the tool calls; None if there is none.
        tool_calls: OpenAI's ``{"id", "type": "function", "function": {"name", "arguments"}}``.
        excluded_because: why the learner must not learn from this call; None if it may.
        token_texts: per token, its text (for OpenAI's ``logprobs`` field).
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    content: str | None
    tool_calls: list[dict[str, Any]]
    finish_reason: FinishReason
    excluded_because: str | None = None
    top_logprobs: list[list[tuple[int, float, str]]] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)


class Sampler(Protocol):
    """Draws completions from the base model and from any loaded adapter, many at once."""

    @property
    def info(self) -> ModelInfo:
        """The base model, once `start` has returned."""
        ...

    @property
    def restarts(self) -> int:
        """How often the engine's process was started again after it died."""
        ...

    async def start(self) -> None:
        """Load the model. Raises ConfigError if it cannot be loaded."""
        ...

    async def close(self) -> None:
        """End the engine's process."""
        ...

    def chat(self, request: ChatRequest) -> AsyncGenerator[ChatDelta | ChatReply, None]:
        """Deltas if `request.stream`, then exactly one `ChatReply`.

        Closing the iterator early cancels the sampling. Raises InvalidRequest (template, schema),
        PromptTooLong, UnknownModel (adapter not loaded), EngineUnavailable (retryable).
        """
        ...

    async def load_adapter(self, name: str, path: Path, *, probe: bool = True) -> None:
        """Make `name` samplable. Raises ConfigError if the adapter is broken.

        Idempotent for the same files, which may have been moved to another directory since. With
        `probe` False, an engine that would ask a new adapter something, to see that it is applied,
        need not: the caller does so itself.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forget `name` once its running calls have ended. Unknown names are ignored."""
        ...

    async def sleep(self) -> None:
        """Leave the device's memory to others, as far as the engine can, until `wake`.

        No call is open, and none is made before `wake`.
        """
        ...

    async def wake(self) -> None:
        """Be ready for calls again; the adapters that were loaded are."""
        ...


@dataclass(frozen=True)
class Demonstration:
    """A reply that is to be learned though no engine of ours said it. All in OpenAI's shape."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    reply: dict[str, Any]


@dataclass(frozen=True)
class TokenTurn:
    """What the model would have been shown, and what it would have said, end of turn included."""

    prompt_token_ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True)
class LearnerStep:
    """One optimizer step (or `config.optimizer_steps` of them) from `parent` to `out`.

    `parent` and `out` are directories of `adapters`; `out` exists and is empty. The learner writes
    the adapter and ``optimizer.safetensors`` there, nothing else, and changes nothing in `parent`.
    `step` is the 1-based number of the version that results: the schedule's clock. `staleness` is
    how many versions older than `parent` the trained calls' samplers were, on average.
    """

    parent: Path
    out: Path
    step: int
    rows: list[Row]
    config: JobConfig
    staleness: float = 0.0


class Learner(Protocol):
    """Turns rows into a new adapter."""

    @property
    def restarts(self) -> int:
        """How often the engine's process was started again after it died."""
        ...

    async def start(self) -> None:
        """Load the model. Raises ConfigError if it cannot be loaded."""
        ...

    async def close(self) -> None:
        """End the engine's process."""
        ...

    async def init_adapter(self, out: Path, lora: LoraConfig) -> None:
        """Write a fresh adapter, equal to the base. Raises ConfigError on unknown targets."""
        ...

    async def step(
        self, request: LearnerStep, on_progress: Callable[[float, str], Awaitable[None]]
    ) -> dict[str, float]:
        """Learn. Returns metrics; raises ArtError if the step must not be taken (non-finite …).

        Deterministic: the same request gives the same bytes on CPU in float32.
        """
        ...

    async def logprobs(self, adapter: Path | None, rows: list[Row]) -> list[list[float]]:
        """Per row, the learner's logprob of each token given those before it; 0.0 at index 0."""
        ...

    async def tokenize(self, turns: Sequence[Demonstration]) -> list[TokenTurn | str]:
        """Put replies into tokens with the model's chat template, in the order given.

        A turn that goes on with an earlier one begins with exactly its tokens, as far as the
        template shows it again. In place of a turn stands why it cannot be shown to the model.
        Deterministic. Raises ConfigError if the model has no chat template.
        """
        ...
