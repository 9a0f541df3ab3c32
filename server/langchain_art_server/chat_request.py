"""A chat request's body: checked once, here, before anything else sees it.

An option that this server does not honour is refused by name, unless its value asks for nothing.
Format: OpenAI's API reference, "Create chat completion", with one field more, ``art``
(`wire.CallTags`), that headers (``x-art-trajectory-id``, ``x-art-node`` …) can carry as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from langchain_art.errors import InvalidRequest
from langchain_art.wire import CallTags
from langchain_art_server.backends.base import Sampling

ROLES = {"system", "developer", "user", "assistant", "tool"}
#: Options of OpenAI's that are accepted only with values that ask for nothing, and those values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "reasoning_effort": (None,),
    "verbosity": (None,),
}
#: Options that tell the server about the caller and change nothing in the reply.
NOTES = ("user", "metadata", "safety_identifier", "prompt_cache_key")


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class ChatBody(BaseModel):
    """The body of a request, without the options of `NEUTRAL` and `NOTES`."""

    model_config = ConfigDict(extra="forbid")
    model: str
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=256)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=5, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    n: int | None = Field(default=None, ge=1, le=16)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    art: CallTags = CallTags()

    def sampling(self) -> Sampling:
        """How each completion is drawn."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            stop=tuple(s for s in stop if s),
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else 0,
        )


def parse(raw: Any, headers: Mapping[str, str]) -> ChatBody:
    """Check a body. Raises InvalidRequest: the field, what was got, what is expected."""
    if not isinstance(raw, dict):
        raise InvalidRequest(f"got a {type(raw).__name__} as body, expected a JSON object")
    for name, neutral in NEUTRAL.items():
        if name in raw and (value := raw.pop(name)) not in neutral:
            raise InvalidRequest(
                f"got {name}={value!r}, which this server does not support; leave it out "
                f"(or send one of {list(neutral)})",
                param=name,
            )
    for name in NOTES:
        raw.pop(name, None)
    tags = raw.pop("art", None)
    if tags is None or isinstance(tags, dict):
        raw["art"] = _header_tags(headers) | (tags or {})
    else:
        raw["art"] = tags  # no object: refused below, by name
    try:
        body = ChatBody.model_validate(raw)
    except ValidationError as error:
        raise refuse(error) from error
    _check_messages(body.messages)
    _check_tools(body)
    return body


def refuse(error: ValidationError) -> InvalidRequest:
    """Pydantic's findings as one refusal: field, problem, what was got."""
    lines: list[str] = []
    for found in error.errors()[:8]:
        where = ".".join(str(part) for part in found["loc"]) or "body"
        if found["type"] == "extra_forbidden":
            lines.append(f"{where}: this option is not known here; leave it out")
        else:
            got = repr(found["input"])
            lines.append(
                f"{where}: {found['msg'].removeprefix('Value error, ')} "
                f"(got {got if len(got) < 200 else got[:200] + '…'})"
            )
    first = error.errors()[0]["loc"]
    return InvalidRequest("; ".join(lines), param=str(first[0]) if first else None)


def _header_tags(headers: Mapping[str, str]) -> dict[str, Any]:
    tags: dict[str, Any] = {
        key: headers[f"x-art-{key.replace('_', '-')}"]
        for key in ("trajectory_id", "scenario", "node", "namespace", "step", "attempt", "thread")
        if f"x-art-{key.replace('_', '-')}" in headers
    }
    if path := headers.get("x-art-path"):
        tags["path"] = tuple(part for part in path.split("/") if part)
    return tags


def _check_messages(messages: list[dict[str, Any]]) -> None:
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise InvalidRequest(
                f"messages.{index}.role: got {message.get('role')!r}, expected one of "
                f"{sorted(ROLES)}",
                param="messages",
            )
        for call in message.get("tool_calls") or []:
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise InvalidRequest(
                    f"messages.{index}.tool_calls: got {call!r}, expected "
                    '{"id", "type": "function", "function": {"name", "arguments"}}',
                    param="messages",
                )
            _check_arguments(index, function.get("arguments"))


def _check_arguments(index: int, arguments: Any) -> None:
    problem = None
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(parsed, dict):
            problem = f"got {arguments!r}"
    except (ValueError, RecursionError) as error:
        problem = f"got malformed JSON {arguments!r} ({error})"
    if problem:
        raise InvalidRequest(
            f"messages.{index}.tool_calls: {problem}, expected a JSON object as arguments. A model "
            "that wrote broken JSON can be answered with an error message instead of a replay "
            "(ChatART does so by itself).",
            param="messages",
        )


def _check_tools(body: ChatBody) -> None:
    names: set[str] = set()
    for index, tool in enumerate(body.tools or []):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise InvalidRequest(
                f'tools.{index}: got type {tool.get("type")!r}, expected "function" with a '
                "function object",
                param="tools",
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(f"tools.{index}.function.name is missing", param="tools")
        names.add(function["name"])
    choice = body.tool_choice
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        raise InvalidRequest(
            f"got tool_choice={choice!r}, expected auto, none, required or a function",
            param="tool_choice",
        )
    if choice in (None, "auto", "none"):
        return
    if not names:
        raise InvalidRequest(f"got tool_choice={choice!r} without tools", param="tool_choice")
    if isinstance(choice, dict):
        function = choice.get("function")
        wanted = function.get("name") if isinstance(function, dict) else None
        if wanted not in names:
            raise InvalidRequest(
                f"got tool_choice for {wanted!r}, expected one of {sorted(names)}",
                param="tool_choice",
            )
