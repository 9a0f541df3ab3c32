"""Reads and checks a chat request.

An option that this server does not support is refused by name, unless its value has no effect.
Format: OpenAI's API reference, "Create chat completion", and the field ``art`` (`wire.CallTags`),
which can also be sent in headers (``x-art-trajectory-id``, ``x-art-node`` …).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isinf
from typing import Annotated, Any, Literal, TypeVar, cast

from pybase64 import b64encode_as_string
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from langchain_art.errors import InvalidRequest, PromptTooLong
from langchain_art.wire import CallTags
from langchain_art_server.backends.base import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH, Sampling
from langchain_art_server.gateway.chat.images import take_images
from langchain_art_server.gateway.refusals import refuse, shown

ROLES = {"system", "developer", "user", "assistant", "tool"}
#: Options that are not supported, and their values that have no effect, which are accepted.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "audio": (None,),
    "functions": (None,),
    "function_call": (None,),
    "moderation": (None,),
    "web_search_options": (None,),
}
#: Options that change no reply; they are ignored.
NOTES = (
    "user",
    "metadata",
    "safety_identifier",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)
_RETRIES = re.compile(rb"[0-9]{1,6}")
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,9}")
#: Counts of tokens go into 32 bits, in vLLM too; seeds are 64 bits wide, as in OpenAI's reference.
MAX_COUNT, _MAX_SEED = 2**31 - 1, 2**63 - 1
#: Stop strings are searched for after every token, so they are few and short. OpenAI allows 4.
_MAX_STOPS, _MAX_STOP_CHARS = 16, 1024
_NOT_RECORDED = {"art", "model", "stream", "stream_options"}


Body = TypeVar("Body", bound=BaseModel)
_StopString = Annotated[str, Field(max_length=_MAX_STOP_CHARS)]
StopStrings = Annotated[list[_StopString], Field(max_length=_MAX_STOPS)]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ChatBody(BaseModel):
    """The body of a request, without the options of `NEUTRAL` and `NOTES`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=256)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = Field(
        default=None,
        description=f"A schema may have {MAX_SCHEMA_CHARS} characters and {MAX_SCHEMA_DEPTH} "
        "levels, and must compile to a grammar within a second.",
    )
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    temperature: float | None = Field(default=None, ge=0, le=5, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_COUNT)
    n: int | None = Field(default=None, ge=1, le=16)
    seed: int | None = Field(default=None, ge=-_MAX_SEED - 1, le=_MAX_SEED)
    stop: _StopString | StopStrings | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    art: CallTags = CallTags()


class CheckedChatRequest:
    """A request, checked.

    Args:
        raw: the parsed JSON of its body. It is changed.
        headers: ASGI's, with names in lower case.
        run: the run that its URL or its key names.
        no_images: why it may have no images; empty: it may.

    Attributes:
        body: the body, with the headers' tags in its `art`.
        count: how many choices are sampled.
        sampling: how the first of them is sampled; the next have the next seeds.
        asked: the other fields of `ChatRequest`, which all of them have.
        record: `CallRecord.request`: the body without what has columns of its own.
        retry: `CallRecord.retry`.
        images: those that its messages name, by SHA-256.

    Raises:
        InvalidRequest: the field, what was got, what is expected.
    """

    def __init__(
        self,
        raw: Any,
        headers: Iterable[tuple[bytes, bytes]] = (),
        run: str | None = None,
        no_images: str = "",
    ) -> None:
        tags = {n: v for n, v in headers if n.startswith((b"x-art-", b"x-stainless-retry-count"))}
        retry = tags.pop(b"x-stainless-retry-count", b"")
        header_tags = _header_tags(tags)
        if run is not None:
            header_tags.setdefault("trajectory_id", run)
        self.body = body = _body(raw, header_tags)
        if run is not None and (tagged := body.art.trajectory_id) != run:
            raise InvalidRequest(
                f"got the run {shown(tagged)} in the tags and {shown(run)} in the URL or the "
                "key, expected one of them alone",
                param="art",
            )
        self.retry = int(retry) if retry and _RETRIES.fullmatch(retry) else 0
        self.count = body.n or 1
        self.images = take_images(body.messages, no_images)
        tools, tool_choice = shown_tools(body.tools or [], body.tool_choice or "auto")
        self.sampling = _sampling(body)
        self.asked: dict[str, Any] = {
            "messages": body.messages,
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "response_format": body.response_format,
            "stream": bool(body.stream),
            "images": {name: b64encode_as_string(one) for name, one in self.images.items()},
        }
        self.record = {
            name: value
            for name, value in vars(body).items()
            if value is not None and name not in _NOT_RECORDED
        }
        if self.images:
            self.record["images"] = list(self.images)


def _sampling(body: ChatBody) -> Sampling:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Sampling(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=body.top_p or 1.0,
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        stop=tuple(s for s in stop if s),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
    )


def refuse_oversize(body: ChatBody, most: int) -> None:
    """Refuse what cannot fit before anything is rendered, tokenised or compiled.

    Raises:
        PromptTooLong: messages and tools have more than `most` characters.
        InvalidRequest: the schema of the reply is too long.
    """
    if _is_longer([body.messages, body.tools], most):
        raise PromptTooLong(
            f"The prompt is too long: got more than {most} characters of messages and tools, "
            f"expected at most {most}: more do not fit the context even if every token is the "
            "longest one of the model. Shorten them, or serve with a larger max_model_len.",
            param="messages",
        )
    if _is_longer(body.response_format, MAX_SCHEMA_CHARS):
        raise InvalidRequest(
            f"got a schema of more than {MAX_SCHEMA_CHARS} characters, expected at most "
            f"{MAX_SCHEMA_CHARS}. Simplify it.",
            param="response_format",
        )


def _is_longer(value: Any, most: int) -> bool:
    """True if a JSON value has more than `most` characters; one that is no string has one.

    The search ends at the first character too many.
    """
    found: list[Any] = [value]
    while found and most >= 0:
        value = found.pop()
        if isinstance(value, dict):
            names = cast(dict[str, Any], value)
            found += names.values()
            most -= sum(map(len, names))
        elif isinstance(value, list):
            found += cast(list[Any], value)
        most -= len(value) if isinstance(value, str) else 1
    return most < 0


def refuse_overflow(raw: dict[str, Any]) -> None:
    """Raises InvalidRequest for a body with a number like ``1e400``, which is infinity by now."""
    for field, value in raw.items():
        found = [value]
        for one in found:  # which grows meanwhile
            kind = one.__class__
            if kind is str:  # most are, and each call of each client comes by here
                continue
            if kind is dict:
                found += one.values()
            elif kind is list:
                found += one
            elif kind is float and isinf(one):
                raise InvalidRequest(
                    f"{field}: got a number that overflows to infinity, expected at most 1.8e308",
                    param=field,
                )


def parse_json(body: bytes) -> Any:
    """A body, parsed as JSON. Raises InvalidRequest: it is none (NaN and infinity are not)."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        hint = ""
        with suppress(ValueError):
            from_json(body, allow_inf_nan=True)
            hint = ". NaN and infinity are no JSON: expected finite numbers, and null for no score"
        raise InvalidRequest(f"The body is not JSON: {error}{hint}") from error


def read_body(
    raw: Any, kind: type[Body], neutral: Mapping[str, tuple[Any, ...]], notes: Iterable[str]
) -> Body:
    """The body of a request, checked.

    From `raw`, its parsed JSON, the names in `neutral` (options that are not supported, with their
    values that have no effect) and in `notes` are removed; `kind` has all others.

    Raises InvalidRequest: the field, what was got, what is expected.
    """
    if not isinstance(raw, dict):
        raise InvalidRequest(f"got a {type(raw).__name__} as body, expected a JSON object")
    for name, accepted in neutral.items():
        if name in raw and (value := raw.pop(name)) not in accepted:
            raise InvalidRequest(
                f"got {name}={shown(value)}, which this server does not support; leave it out "
                f"(or send one of {list(accepted)})",
                param=name,
            )
    for name in notes:
        raw.pop(name, None)
    try:
        body = kind.model_validate(raw)
    except ValidationError as error:
        raise refuse(error.errors(), kind) from error
    refuse_overflow(raw)
    return body


def _body(raw: Any, header_tags: dict[str, Any]) -> ChatBody:
    if isinstance(raw, dict):
        tags = {} if raw.get("art") is None else raw["art"]
        if isinstance(tags, dict):  # others are refused below
            raw["art"] = header_tags | tags
    body = read_body(raw, ChatBody, NEUTRAL, NOTES)
    for index, message in enumerate(body.messages):
        _check_message(index, message)
    _check_pairs(body)
    return body


def _check_pairs(body: ChatBody) -> None:
    """Check options that need another one, or exclude each other."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            f"got top_logprobs={body.top_logprobs} without logprobs=true; add it, or leave both "
            "out",
            param="top_logprobs",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "got stream_options without stream=true; add it, or leave them out",
            param="stream_options",
        )
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise InvalidRequest(
            f"got max_tokens={body.max_tokens} and max_completion_tokens="
            f"{body.max_completion_tokens}, which mean the same; send one of them",
            param="max_tokens",
        )


def _header_tags(headers: dict[bytes, bytes]) -> dict[str, Any]:
    tags: dict[str, Any] = {
        name.removeprefix(b"x-art-").decode("latin-1").replace("-", "_"): _text(value)
        for name, value in headers.items()
    }
    for name, separator in (("path", "/"), ("tags", ",")):
        if name in tags:
            parts = (part.strip() for part in tags[name].split(separator))
            tags[name] = tuple(part for part in parts if part)
    for name in ("step", "attempt"):
        if _WHOLE_NUMBER.fullmatch(tags.get(name, "")):
            tags[name] = int(tags[name])
    return tags


def _text(value: bytes) -> str:
    """A header's text, in UTF-8 or else in latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _check_message(index: int, message: dict[str, Any]) -> None:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(
            f"messages.{index}.role: got {shown(role)}, expected one of {sorted(ROLES)}",
            param="messages",
        )
    if role != "assistant" and message.get("content") is None:
        raise InvalidRequest(
            f"messages.{index}.content: got none, expected a text or a list of parts; an empty "
            "message has an empty text",
            param="messages",
        )
    for name in ("audio", "function_call"):
        if message.get(name):
            raise InvalidRequest(
                f"messages.{index}.{name}: got {shown(message[name])}, which this server does not "
                "support; the model would not be shown it. Write tool calls as tool_calls.",
                param="messages",
            )
    if calls := message.get("tool_calls"):
        is_list = isinstance(calls, list)
        if malformed := [one for one in calls if not _function(one)] if is_list else [calls]:
            raise InvalidRequest(
                f"messages.{index}.tool_calls: got {shown(malformed[0])}, expected "
                '{"id", "type": "function", "function": {"name", "arguments"}}',
                param="messages",
            )
        for call in calls:
            _check_arguments(index, call["function"].get("arguments"))


def shown_tools(
    tools: list[dict[str, Any]], choice: str | dict[str, Any]
) -> tuple[list[dict[str, Any]], str | dict[str, Any]]:
    """The tools for the prompt, and `ChatRequest.tool_choice`.

    With OpenAI's ``allowed_tools``, only those are in the prompt.

    Raises InvalidRequest: a tool that is not in the request, or an unknown form of the choice.
    """
    names = {_tool_name(index, tool) for index, tool in enumerate(tools)}
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise _choice(f"got {shown(choice)}, expected auto, none, required or an object")
        if choice == "required" and not names:
            raise _choice("got 'required' without tools")
        return tools, choice
    kind = choice.get("type")
    if kind == "function":
        _allowed(choice, names)
        return tools, choice
    if kind != "allowed_tools":
        raise _choice(f"got type {shown(kind)}, expected 'function' or 'allowed_tools'")
    allowed = choice.get("allowed_tools")
    wanted = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(allowed, dict) or not isinstance(wanted, list) or not wanted:
        expected = '{"allowed_tools": {"mode", "tools": […]}}'
        raise _choice(f"got {shown(choice)}, expected {expected}")
    if allowed.get("mode") not in ("auto", "required"):
        raise _choice(f"got mode {shown(allowed.get('mode'))}, expected 'auto' or 'required'")
    kept = {_allowed(one, names) for one in wanted}
    return [tool for tool in tools if tool["function"]["name"] in kept], allowed["mode"]


def _tool_name(index: int, tool: dict[str, Any]) -> str:
    if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise InvalidRequest(
            f'tools.{index}: got type {shown(tool.get("type"))}, expected "function" with a '
            "function object",
            param="tools",
        )
    if not isinstance(schema := tool["function"].get("parameters"), dict | None):
        raise InvalidRequest(
            f"tools.{index}.function.parameters: got {shown(schema)}, expected a JSON schema, "
            "which is an object",
            param="tools",
        )
    if name := _function(tool).get("name"):
        return name
    raise InvalidRequest(f"tools.{index}.function.name is missing", param="tools")


def _function(value: Any) -> dict[str, Any]:
    """The ``function`` of a tool, a choice or a call; empty if it is none or has no name."""
    function = value.get("function") if isinstance(value, dict) else None
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else {}


def _allowed(choice: Any, names: set[str]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        raise _choice(f"got {shown(name)}, expected one of the request's tools: {sorted(names)}")
    return name


def _choice(problem: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice: {problem}", param="tool_choice")


def _check_arguments(index: int, arguments: Any) -> None:
    problem = None
    try:
        parsed = from_json(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(parsed, dict):
            problem = f"got {shown(arguments)}"
    except ValueError as error:
        problem = f"got malformed JSON {shown(arguments)} ({error})"
    if problem:
        raise InvalidRequest(
            f"messages.{index}.tool_calls: {problem}, expected a JSON object as arguments. A model "
            "that wrote broken JSON can be answered with an error message instead of a replay "
            "(ChatART does so by itself).",
            param="messages",
        )
