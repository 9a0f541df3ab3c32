"""A backend's interface: a `Sampler` samples replies, a learner (`peft.learner`) trains adapters.

An adapter is an immutable directory in PEFT's format (``adapter_config.json``,
``adapter_model.safetensors``) with a name that is used once (``email-agent@17``); samplers cache by
name, learners read one directory and write another.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from langchain_art.wire import ReplicaStatus, StepConfig
from langchain_art_server.algorithms.sequences.training_rows import Row

#: Most characters of the schemas that a reply must follow, and most levels of one: about twice what
#: OpenAI allows.
MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH = 1 << 18, 64

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class ModelInfo:
    """The base model as the engine loaded it."""

    name: str  # the name it is served under
    path: str  # hub name or local path
    parameters: int
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int  # size of the logits: every token id is below it
    longest_token: int  # characters of the longest token, as its vocabulary writes it
    weights: str = ""
    """Digest of the 4-bit weights (`base_weights.weights_of`); empty if not in 4 bits."""
    no_images: str = "it reads text only"
    """Reason why calls may have no images, in words; empty: they may."""

    @property
    def max_prompt_chars(self) -> int:
        """A text of more characters has more tokens than the context."""
        return self.max_model_len * self.longest_token


@dataclass(frozen=True)
class Sampling:
    """Settings by which one completion is sampled.

    `logprobs` of a reply are those of the distribution that was sampled: log-softmax of
    logits / temperature over the tokens that a grammar, `top_k` and `top_p` left, in this order.
    The learner applies the same temperature, over the same tokens (`ChatReply.drawn_from`). Greedy
    decoding (temperature 0) is no distribution: such calls are excluded from training.
    """

    max_tokens: int | None = None  # None: as many as the context has room for
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True)
class Demonstration:
    """A given reply for supervised fine-tuning, in OpenAI's shape."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    reply: dict[str, Any]


@dataclass(frozen=True)
class TokenTurn:
    """The tokens of a demonstration's prompt, and of its reply with the end-of-turn token."""

    prompt_token_ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True)
class EarlierCall(TokenTurn, Demonstration):
    """A call that another server has answered: OpenAI's values, and the tokens of both."""


@dataclass(frozen=True)
class ChatRequest:
    """A completion to sample. `messages` and `tools` are OpenAI's, already validated."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    """``auto``, ``none``, ``required`` or ``{"type": "function", "function": {"name": …}}``."""
    parallel_tool_calls: bool = True  # False: at most the first of a reply's tool calls counts
    response_format: dict[str, Any] | None = None  # OpenAI's ``json_schema`` or ``json_object``
    adapter: str | None = None  # name of a loaded adapter; None is the base model
    sampling: Sampling = Sampling()
    stream: bool = False
    client: str = ""
    """Client that asks: an engine is shared between clients. The server's own are ``""``."""
    run: str = ""
    """The run (or else the thread) that it is a call of; ``""``: of none. Where there are several
    engines, one has the calls of a run, whose prompts begin alike."""
    tenant: str = ""
    """No call of another tenant is answered from what is kept of this one. The default one is
    ``""``."""
    images: Mapping[str, str] = field(default_factory=dict[str, str])
    """The images that the messages name, in base64 by SHA-256 (`wire.images`)."""
    earlier: Sequence[EarlierCall] = ()
    """Calls of its run whose tokens its prompt is to have, if it repeats them."""


@dataclass(frozen=True)
class ChatDelta:
    """A piece of a streamed reply, in OpenAI's shape: text or whole tool calls."""

    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class ChatReply:
    """A finished completion."""

    prompt_token_ids: Sequence[int]  # the prompt
    token_ids: Sequence[int]  # the sampled tokens, with the end-of-turn token
    logprobs: Sequence[float]  # one per token id, under the distribution that was sampled
    content: str | None  # the text beside the tool calls; None if there is none
    tool_calls: list[dict[str, Any]]
    """OpenAI's ``{"id", "type": "function", "function": {"name", "arguments"}}``."""
    finish_reason: FinishReason
    excluded_because: str | None = None  # why the call is not trained; None if it may be
    top_logprobs: list[list[tuple[int, float, str]]] = field(default_factory=list)
    """Per token, ``[(token_id, logprob), …]``; empty unless asked for."""
    token_texts: list[str] = field(default_factory=list)
    """Text of each token (for OpenAI's ``logprobs`` field)."""
    drawn_from: bytes = b""
    """The tokens that each one was drawn from, as `token_sets.pack` gives them; empty if it was the
    whole vocabulary each time."""
    stopped_by: str | None = None  # the stop string that ended it; None if another end came first


@dataclass(frozen=True)
class SamplerState:
    """State of a sampler."""

    loop_lag: float
    """Longest time, in seconds, that the engine's loop took for a turn, in the last minute."""
    free_bytes: float | None
    """Memory of its device that is free for adapters; None: unknown, or the engine has set aside
    what it needs for them."""
    running: int = 0  # calls that are sampled now
    waiting: int = 0  # calls that wait until they are


class Engine(Protocol):
    """Common interface of samplers and learners."""

    @property
    def restarts(self) -> int:
        """Number of times the engine's process was started again after it died."""
        ...

    @property
    def problem(self) -> str | None:
        """Reason why it does not answer calls now, in words for anyone to read; None: it does."""
        ...

    async def start(self) -> None:
        """Load the model. Raises ConfigError if it cannot be loaded."""

    async def close(self) -> None:
        """End the engine's process."""


class ChatEngine(Protocol):
    """Interface of what answers calls."""

    @property
    def info(self) -> ModelInfo:
        """The base model, once it is loaded."""
        ...

    def chat(self, request: ChatRequest) -> AsyncGenerator[ChatDelta | ChatReply, None]:
        """Deltas if `request.stream`, then exactly one `ChatReply`.

        Closing the iterator early cancels the sampling. Raises InvalidRequest (template, schema, or
        the engine died of this request before), PromptTooLong, UnknownModel (adapter not loaded),
        EngineUnavailable (retryable): also if the engine dies during the call, which is never sent
        to it a second time.
        """
        ...


class Sampler(Engine, ChatEngine, Protocol):
    """Samples completions from the base model and any loaded adapter, many at once."""

    @property
    def engines(self) -> Sequence[ChatEngine]:
        """Engines that answer calls now, each with all adapters; without replicas, itself."""
        ...

    @property
    def replicas(self) -> tuple[ReplicaStatus, ...]:
        """The state of each replica; empty without replicas."""
        ...

    async def ready(self) -> None:
        """Wait until it answers, after a restart with its adapters loaded again.

        Raises EngineUnavailable: its process cannot be started.
        """

    async def state(self) -> SamplerState | None:
        """Current state; None while the engine does not answer."""
        ...

    async def load_adapter(self, name: str, path: Path, *, probe: bool = True) -> None:
        """Load an adapter. Raises ConfigError if it is broken.

        Idempotent for the same files, even if they were moved to another directory. With `probe`
        False, the engine does not check that a new adapter has an effect: the caller does.
        """

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter after its running calls. Unknown names are ignored."""

    async def sleep(self) -> None:
        """Free as much of the device's memory as the engine can, until `wake`.

        No call may be open, and none may be made before `wake`.
        """

    async def wake(self) -> None:
        """Be ready for calls again, with the same adapters loaded."""


@dataclass(frozen=True)
class LearnerStep:
    """One optimizer step (or `config.optimizer_steps` of them) from `parent` to `out`.

    `parent` and `out` are directories of `adapters`; `out` exists and is empty. The learner writes
    the adapter and ``optimizer.safetensors`` there, nothing else, and changes nothing in `parent`.
    `step` is the clock of the learning rate's schedule, from 1.
    `staleness` is how many versions older than `parent` the trained calls' samplers were, on
    average. With `fresh_optimizer`, Adam begins anew instead of with the state of `parent`.
    `reference` is the adapter that ``config.divergence`` measures from; None: the base model.
    `attempt` is 1 more than how often the learner's process died in this step: of memory, perhaps.
    """

    parent: Path
    out: Path
    step: int
    rows: list[Row]
    config: StepConfig
    staleness: float = 0.0
    fresh_optimizer: bool = False
    reference: Path | None = None
    attempt: int = 1
