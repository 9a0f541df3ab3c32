"""The judge: a chat model of LangChain, or a model's name for litellm; and its costs."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, cast

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig

from langchain_art.errors import ConfigError
from langchain_art.evaluators.ruler.reply_parser import Verdict
from langchain_art.evaluators.transcript import compact

_AT_ONCE = 32  # calls of one judge


@dataclass(frozen=True)
class Spent:
    """Counts and costs of judging, summed."""

    groups: int = 0  # scored
    unjudged: int = 0  # groups without a verdict
    decided: int = 0  # groups scored without a question
    calls: int = 0  # of the model, failed ones included
    unusable: int = 0  # calls that raised or whose reply could not be used
    cached: int = 0  # questions answered by the cache
    input_tokens: int = 0  # as the judge's provider counts them
    output_tokens: int = 0  # likewise, reasoning included
    cost: float = 0.0  # US dollars, of the calls whose price litellm knows
    unpriced: int = 0  # replies whose price is not known

    def __add__(self, other: Spent) -> Spent:
        mine, theirs = asdict(self), asdict(other)
        return Spent(**{name: mine[name] + theirs[name] for name in mine})

    def __str__(self) -> str:
        cost = f"${self.cost:.4f}" + (f" and {self.unpriced} unpriced" if self.unpriced else "")
        return (
            f"{self.groups} groups judged, {self.decided} of them without a question, "
            f"{self.unjudged} not judged; {self.calls} calls ({self.unusable} unusable), "
            f"{self.cached} from the cache; {self.input_tokens} tokens read, "
            f"{self.output_tokens} written, {cost}"
        )


class Judge:
    """A chat model that gives verdicts.

    Args:
        model: a chat model, or a name that litellm knows (``openai/o3``, ``ollama/qwen3``).
        litellm_params: fields of `ChatLiteLLM` (``api_base``, ``temperature`` …) for a name.
        structured: use the model's structured output with the schema `Verdict`, if it has one.

    Raises:
        ConfigError: neither a chat model nor a name; a name without the extra ``ruler``; parameters
            with a chat model.
    """

    def __init__(
        self,
        model: BaseChatModel | str,
        *,
        litellm_params: Mapping[str, Any] | None = None,
        structured: bool = True,
    ) -> None:
        self.model = _chat_model(model, litellm_params)
        self._asked: Runnable[LanguageModelInput, Any] = self.model
        if structured:
            try:
                self._asked = self.model.with_structured_output(Verdict, include_raw=True)
            except NotImplementedError:
                structured = False  # the JSON is parsed from the text
        self.structured = structured
        # By process: threads do not survive a fork.
        self._threads = cache(_new_threads)

    @property
    def identity(self) -> str:
        """A digest of the model's class and settings, without secrets."""
        plain = (str, int, float, bool, list, dict, tuple)
        fields = {name: value for name, value in self.model if isinstance(value, plain)}
        kind = type(self.model)
        settings = self.model._get_llm_string()  # pyright: ignore[reportPrivateUsage]
        name = f"{kind.__module__}.{kind.__qualname__}"
        parts = [name, settings, compact(fields), str(self.structured)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def __str__(self) -> str:
        """Class and name of the model, as the cache stores them for people."""
        fields = dict(self.model)
        name = fields.get("model_name") or fields.get("model")
        return f"{type(self.model).__name__} {name or ''}".strip()

    async def ask(self, messages: Sequence[BaseMessage], source: str) -> AIMessage:
        """The model's reply. `source` names the call, as ``lc_source`` does for captures."""
        config = RunnableConfig(run_name=source, metadata={"lc_source": source})
        run, threads = copy_context().run, self._threads(os.getpid())
        found = await asyncio.get_running_loop().run_in_executor(
            threads, lambda: run(self._asked.invoke, list(messages), config)
        )
        return cast("AIMessage", found["raw"] if self.structured else found)


def _new_threads(_process: int) -> ThreadPoolExecutor:
    """Threads in which a model is called synchronously.

    Chat models keep the connections of their asynchronous clients across event loops. If a program
    runs several loops one after the other (``asyncio.run`` twice, `Trainer.fit_sync`), these
    connections belong to closed loops.
    """
    return ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="langchain-art-judge")


def spent_on(reply: AIMessage) -> Spent:
    """Tokens and price of a reply, as far as they are reported."""
    usage = reply.usage_metadata
    cost = reply.response_metadata.get("response_cost")
    return Spent(
        input_tokens=usage["input_tokens"] if usage else 0,
        output_tokens=usage["output_tokens"] if usage else 0,
        cost=float(cost or 0.0),
        unpriced=int(cost is None),
    )


def _chat_model(model: object, params: Mapping[str, Any] | None) -> BaseChatModel:
    if isinstance(model, BaseChatModel):
        if params:
            raise ConfigError(
                f"got litellm_params {sorted(params)} beside a chat model, expected them with a "
                "name only; set them on the model itself"
            )
        return model
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"got {type(model).__name__} as the judge, expected a chat model of LangChain or a "
            "model's name as litellm writes it, such as 'openai/o3'"
        )
    try:
        # Heavy, and an optional dependency.
        from langchain_litellm import (  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
            ChatLiteLLM,
        )
    except ImportError as error:
        raise ConfigError(
            f"got the judge {model!r}, which litellm has to call, and it is not installed. "
            'pip install "langchain-art[ruler]", or give a chat model instead of a name'
        ) from error
    known = {*ChatLiteLLM.model_fields, *(f.alias for f in ChatLiteLLM.model_fields.values())}
    if unknown := sorted(set(params or {}) - known):
        raise ConfigError(
            f"got litellm_params {unknown}, expected fields of ChatLiteLLM; what litellm takes "
            "beside them goes into litellm_params={'model_kwargs': {…}}"
        )
    return ChatLiteLLM(**{"model": model, **(params or {})})
