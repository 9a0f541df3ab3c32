"""The judge: a chat model or Runnable of LangChain, or a model's name for litellm; its costs.

A call is synchronous, in a thread of its own. Chat models keep the connections of their
asynchronous clients across event loops, and share them with other models; if a program runs several
loops (``asyncio.run`` twice, `Trainer.fit_sync`, an evaluator that is invoked synchronously), these
connections belong to another loop. A call that is cancelled or takes too long is left to its
thread, which does not keep the program alive.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cache, partial
from threading import Lock, Thread
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias, TypeVar, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from pydantic import BaseModel

from langchain_art._callables import called_in_thread
from langchain_art.client import http_request
from langchain_art.errors import ConfigError
from langchain_art.evaluators.ruler.reply_parser import UnusableReply, Verdict
from langchain_art.evaluators.transcript import compact

_AT_ONCE = 32

T = TypeVar("T")


class JudgeCalls:
    """The calls of one model, from any event loops: at most `at_once` together, in order."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._free = at_once
        self._waiting: deque[Future[None]] = deque()
        self._lock = Lock()
        self._resumed = 0.0

    async def run(self, function: Callable[[], T], timeout: float | None) -> T:
        """The result of `function`, in a thread; a TimeoutError after `timeout` seconds in it."""
        await self._enter()
        try:
            while (left := self._resumed - time.monotonic()) > 0:
                await asyncio.sleep(left)
            scope = asyncio.timeout(timeout)
            try:
                async with scope:
                    return await asyncio.wrap_future(_started(function))
            except TimeoutError as error:
                if not scope.expired():
                    raise
                raise TimeoutError(f"no answer in {timeout:g} s (`timeout`)") from error
        finally:
            self._leave()

    def pause(self, seconds: float) -> None:
        """Let no call begin for so long."""
        self._resumed = max(self._resumed, time.monotonic() + seconds)

    async def _enter(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn: Future[None] = Future()
            self._waiting.append(turn)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # it came at the same moment
                self._leave()
            raise

    def _leave(self) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1


def calls_of(identity: str) -> JudgeCalls:
    """The calls of the model of this `judge_model.identity`, whoever asks it."""
    return _calls_of(identity, os.getpid())


@cache
def _calls_of(identity: str, process: int) -> JudgeCalls:  # a fork does not copy the threads
    return JudgeCalls()


def _started(function: Callable[[], T]) -> Future[T]:
    """`function` in a thread that does not keep the program alive, with the caller's context."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()
    context = copy_context()

    def work() -> None:
        try:
            found = context.run(called_in_thread, function)
        except BaseException as error:  # noqa: BLE001 - the task that waits raises it
            done.set_exception(error)
        else:
            done.set_result(found)

    Thread(target=work, name="langchain-art-judge", daemon=True).start()
    return done


#: Statuses with which the same question is refused again: of a key, a name or the question itself.
_FINAL = {400, 401, 402, 403, 404, 405, 413, 422}


def is_final(error: BaseException) -> bool:
    """True if the error's status, as SDKs keep it, says that asking again gives the same."""
    for one in _causes(error):
        response: object = getattr(one, "response", None)
        status: object = getattr(one, "status_code", getattr(response, "status_code", None))
        if isinstance(status, int):
            return status in _FINAL
    return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, then its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def retry_after(error: BaseException) -> float | None:
    """Seconds to wait that the answer behind an error asks for; None if it asks for nothing.

    Read are the headers of the error's response (`http_request.retry_after`), as the SDKs of
    OpenAI, Anthropic, httpx and litellm keep it, and the attribute `retry_after` of our own errors;
    of the error, or of its causes.
    """
    for one in _causes(error):
        own: object = getattr(one, "retry_after", None)
        if isinstance(own, int | float):
            return max(0.0, float(own))
        response: object = getattr(one, "response", None)
        for headers in (
            getattr(response, "headers", None),
            getattr(one, "litellm_response_headers", None),
        ):
            if isinstance(headers, Mapping):
                asked = http_request.retry_after(cast("Mapping[Any, Any]", headers))
                if asked is not None:
                    return asked
    return None


#: Fields of LangChain's classes that decide how a call is watched or stored, and not its reply.
_ASIDE = {
    "cache", "callback_manager", "callbacks", "custom_get_token_ids", "metadata", "name",
    "rate_limiter", "tags", "verbose",
}  # fmt: skip


def identity(judge: object) -> str:
    """A digest of a judge's classes and settings.

    Settings are plain values, in any nesting, of models, Runnables and functions (with their code
    and what they close over). Of other objects, such as clients and secrets, only the class counts.
    """
    return hashlib.sha256(compact(_described(judge, ())).encode()).hexdigest()


def configured() -> Any:
    """The values for configurable fields with which the present call was made."""
    given = ensure_config().get("configurable") or {}
    return {k: v for k, v in given.items() if isinstance(v, str | int | float)}


def _described(value: Any, within: tuple[int, ...]) -> Any:
    if isinstance(value, Enum | bytes):
        return repr(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if id(value) in within:
        return "…"
    within = (*within, id(value))
    if isinstance(value, Mapping):
        return _fields(value.items(), within)
    if isinstance(value, list | tuple):
        return [_described(one, within) for one in value]
    if isinstance(value, Set):
        return sorted(compact(_described(one, within)) for one in value)
    if isinstance(value, FunctionType | MethodType | partial | type):
        return _callable(cast("Any", value), within)
    fields: Iterable[tuple[str, Any]] = ()
    if isinstance(value, BaseModel):
        fields = value
    elif isinstance(value, Runnable):
        fields = vars(cast("Any", value)).items()
    return [_name(type(value)), _fields((f for f in fields if f[0] not in _ASIDE), within)]


def _callable(value: Any, within: tuple[int, ...]) -> Any:
    if isinstance(value, type):
        return _name(value)
    if isinstance(value, FunctionType):
        return _function(value, within)
    if isinstance(value, MethodType):
        return [_described(value.__func__, within), _described(value.__self__, within)]
    return [_described(part, within) for part in (value.func, value.args, value.keywords)]


def _fields(values: Iterable[tuple[Any, Any]], within: tuple[int, ...]) -> dict[str, Any]:
    found = {str(name): _described(value, within) for name, value in values}
    return dict(sorted(found.items()))


def _function(function: FunctionType, within: tuple[int, ...]) -> list[Any]:
    kept: list[Any] = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            kept.append(cell.cell_contents)
    return [_name(function), _code(function.__code__), *(_described(one, within) for one in kept)]


def _code(code: CodeType) -> list[Any]:
    return [code.co_code.hex(), code.co_names, [_constant(one) for one in code.co_consts]]


def _constant(value: object) -> Any:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, frozenset):  # whose order differs from process to process
        return sorted(map(repr, value))
    return repr(value)


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


JudgeModel: TypeAlias = "Runnable[Any, Any] | str"
"""A chat model of LangChain, another Runnable that answers messages, or a name for litellm."""


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
    """A model that gives verdicts.

    A chat model that has structured output is asked for it, with the schema `Verdict`; any other
    Runnable is asked for JSON in words.

    Args:
        model: see `JudgeModel`; a Runnable answers with a message, a text, or a verdict's JSON.
        litellm_params: fields of `ChatLiteLLM` (``api_base``, ``temperature`` …) for a name.
        timeout: most seconds for a call; None: as many as it takes.

    Raises:
        ConfigError: neither a Runnable nor a name; a name without the extra ``ruler``; parameters
            with a Runnable; a timeout that is not positive.
    """

    def __init__(
        self,
        model: JudgeModel,
        *,
        litellm_params: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"got {timeout=}, expected seconds above 0, or None for no limit")
        self.model = _runnable(model, litellm_params)
        self.timeout = timeout
        self._asked: Runnable[Any, Any] = self.model
        self.structured = False
        if isinstance(self.model, BaseChatModel):
            # One without structured output is asked as it is.
            with suppress(NotImplementedError):
                self._asked = self.model.with_structured_output(Verdict, include_raw=True)
                self.structured = True
        self._model_identity = identity(self.model)

    @property
    def identity(self) -> str:
        """A digest of the model's class and settings, without secrets and memory addresses.

        It includes the values of configurable fields that the present call was given.
        """
        given = None if isinstance(self.model, BaseChatModel) else configured()
        parts = [identity(self.model), str(self.structured), compact(given)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def __str__(self) -> str:
        """Class and name of the model, as the cache stores them for people."""
        within: Any = self.model
        while not isinstance(within, BaseChatModel) and (inner := _inner(within)) is not None:
            within = inner
        fields = dict(within) if isinstance(within, BaseChatModel) else {}
        name = fields.get("model_name") or fields.get("model")
        return f"{type(within).__name__} {name or ''}".strip()

    async def ask(self, messages: Sequence[BaseMessage], source: str) -> AIMessage:
        """The model's reply. `source` names the call, as ``lc_source`` does for captures.

        All judges of one model share its calls (`JudgeCalls`). Cancelling ends the
        waiting, and a call that has not begun.

        Raises:
            TimeoutError: it took longer than `timeout`.
            UnusableReply: the reply is neither a message, nor a text, nor JSON.
        """
        config = RunnableConfig(run_name=source, metadata={"lc_source": source})
        calls = calls_of(self._model_identity)
        return _message(
            await calls.run(lambda: self._asked.invoke(list(messages), config), self.timeout)
        )

    def pause(self, seconds: float) -> None:
        """Let no call of the model begin for so long (at most `timeout`), whoever makes it."""
        most = seconds if self.timeout is None else min(seconds, self.timeout)
        calls_of(self._model_identity).pause(most)


def _message(found: Any) -> AIMessage:
    """A Runnable's answer as a message; of structured output, the raw one or the JSON."""
    if isinstance(found, Mapping) and isinstance(found.get("raw"), BaseMessage):
        found = found["raw"]
    if isinstance(found, AIMessage):
        return found
    if isinstance(found, BaseMessage):
        return AIMessage(cast("Any", found.content))
    if isinstance(found, str):
        return AIMessage(found)
    if isinstance(found, BaseModel):
        return AIMessage(found.model_dump_json())
    if isinstance(found, Mapping | list):
        return AIMessage(compact(found))
    raise UnusableReply(f"it is {found!r:.80}, expected a message, a text or the JSON of a verdict")


def _inner(runnable: Any) -> Any:
    """First model called by a binding, a retry, a fallback or a model with configurable fields."""
    fields = vars(runnable)
    return next((fields[n] for n in ("bound", "runnable", "default") if n in fields), None)


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


def _runnable(model: object, params: Mapping[str, Any] | None) -> Runnable[Any, Any]:
    if isinstance(model, Runnable):
        if params:
            raise ConfigError(
                f"got litellm_params {sorted(params)} beside a model, expected them with a name "
                "only; set them on the model itself"
            )
        return cast("Runnable[Any, Any]", model)
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"got {type(model).__name__} as the judge, expected a chat model of LangChain, another "
            "Runnable that answers messages, or a model's name as litellm writes it, such as "
            "'openai/o3'"
        )
    try:
        # Heavy, and an optional dependency.
        from langchain_litellm import ChatLiteLLM  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
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
