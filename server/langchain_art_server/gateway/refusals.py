"""Errors as responses in the form of OpenAI's API, and what a message shows of a value."""

from __future__ import annotations

import errno
import reprlib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from langchain_art.errors import (
    ArtError,
    ConfigError,
    EngineUnavailable,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestRefused,
)
from langchain_art.wire.field_hints import place, unknown_field
from langchain_art_server.telemetry.log_context import CURRENT

#: Characters of a message, and of one value in it: a request of 30 MB gets no answer of 30 MB.
_MESSAGE, _VALUE = 4000, 200
#: Anthropic's name of an error, by its status; of others: ``invalid_request_error`` below 500.
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_UNEXPECTED = "The server failed at this request; its log has the traceback. Please report it."
_LISTED = "GET /openapi.json lists the routes."


def answer(error: Exception, path: str) -> JSONResponse:
    """The response to an error. An unexpected one is 500, without its words.

    `path` is the request's: Anthropic's has errors of its own shape.
    """
    if isinstance(error, ConfigError):  # of what the request asks for
        error = InvalidRequest(str(error))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        error = EngineUnavailable(
            "The server's disk is full. Free disk space, then send the request again.",
            retry_after=30,
        )
    headers: dict[str, str] = {}
    if isinstance(error, RequestRefused):
        status, body = error.status, error.body()
        body["error"]["message"] = body["error"]["message"][:_MESSAGE]
        if error.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(error.retry_after)))
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
    else:
        said = str(error) if isinstance(error, ArtError) else _UNEXPECTED
        status, body = 500, RequestRefused(said).body()
        body["error"] |= {"type": "server_error", "code": "internal_error"}
    if (context := CURRENT.get()) is not None:
        context.refused = body["error"]["code"]
    if path.startswith("/v1/messages"):
        body = anthropic_error(status, body)
    return JSONResponse(body, status_code=status, headers=headers)


def anthropic_error(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """An error in Anthropic's shape, with the fields of ours beside."""
    kind = _ANTHROPIC.get(status, "invalid_request_error")
    return {"type": "error", "error": body["error"] | {"type": kind}}


def no_such_path(method: str, path: str) -> NotFound:
    """The refusal where no route is."""
    hint = ""
    if path.startswith(("/chat/", "/completions", "/models", "/responses", "/embeddings")):
        hint = f"base_url ends with /v1 here: {shown('/v1' + path)}. "
    elif path.endswith(("/readyz", "/status")):
        hint = "base_url (ART_BASE_URL) is http://HOST:PORT/v1 here, without another path. "
    return NotFound(f"got {method} {shown(path)}, which is no route. {hint}{_LISTED}")


def no_such_route(method: str, path: str, error: HTTPException) -> JSONResponse:
    """The response where no route is: 404, or 405 where the path has one of another method."""
    if error.status_code != 405:
        return answer(no_such_path(method, path), path)
    allowed = (error.headers or {}).get("Allow", "")
    problem = f"got {method} {shown(path)}, expected one of {allowed}. {_LISTED}"
    response = answer(MethodNotAllowed(problem), path)
    response.headers["Allow"] = allowed
    return response


class _Short(reprlib.Repr):
    """`repr` that costs the same whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _VALUE

    def repr_str(self, x: str, level: int) -> str:
        return repr(x) if len(x) <= _VALUE else repr(x[:_VALUE]) + "…"

    def repr_int(self, x: int, level: int) -> str:
        # Python writes no integer of more than 4,300 digits.
        return repr(x) if x.bit_length() <= 256 else f"an integer of {x.bit_length()} bits"


_short = _Short()


def shown(value: Any) -> str:
    """A value for a message."""
    text = _short.repr(value)
    return text if len(text) <= 2 * _VALUE else text[: 2 * _VALUE] + "…"


def refuse(errors: Sequence[Any], kind: type[BaseModel] | None = None) -> InvalidRequest:
    """Pydantic's errors (`ErrorDetails`) as one: field, problem, what was got.

    `kind` is the model that was read, for the fields that may have been meant.
    """
    lines: list[str] = []
    for found in errors[:8]:
        loc = [part[:_VALUE] if isinstance(part, str) else part for part in found["loc"]]
        where = (place(kind, loc)[0] if kind else ".".join(map(str, loc))) or "body"
        if found["type"] == "extra_forbidden" and kind is not None:
            lines.append(unknown_field(kind, loc))
        else:
            problem = found["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: {problem} (got {shown(found['input'])})")
    first = errors[0]["loc"]
    return InvalidRequest("; ".join(lines), param=str(first[0])[:_VALUE] if first else None)
