"""The OpenAI SDK's rules for failed requests: which are retried, after how long, what is raised.

The SDK applies them to the requests that it sends, and `fast_path` to those that it sends itself.
"""

from __future__ import annotations

import math
import random
import time
from email.utils import mktime_tz, parsedate_tz
from typing import Any, TypeAlias

import openai
from pydantic_core import from_json

from langchain_art.chat_models.http_pools import httpx

#: What became of a request: an answer, or an exception.
Outcome: TypeAlias = httpx.Response | Exception

_MAX_RETRY_AFTER = 120.0
_STATUS_ERRORS: dict[int, type[openai.APIStatusError]] = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    409: openai.ConflictError,
    422: openai.UnprocessableEntityError,
    429: openai.RateLimitError,
}


def retry_delay(outcome: Outcome, retries_taken: int, max_retries: int) -> float | None:
    """Seconds to wait before the next attempt; None if there is to be none.

    Retried are connection errors, timeouts, and the statuses 408, 409, 429 and 500 and above,
    unless ``x-should-retry`` says otherwise. The delay is that of ``retry-after-ms`` or
    ``retry-after`` (seconds or a date), else 0.5 s, 1 s, 2 s … up to 8 s, less up to a quarter at
    random. An answer with a ``retry-after`` above two minutes is not retried.
    """
    asked = 0.0
    if isinstance(outcome, httpx.Response):
        asked = _retry_after(outcome.headers)
        if asked > _MAX_RETRY_AFTER or not _is_retryable(outcome):
            return None
    if retries_taken >= max_retries:
        return None
    if asked:
        return asked
    return min(0.5 * 2.0 ** min(retries_taken, 10), 8.0) * (1 - 0.25 * random.random())


def _is_retryable(response: httpx.Response) -> bool:
    if (said := response.headers.get("x-should-retry")) in ("true", "false"):
        return said == "true"
    return response.status_code in (408, 409, 429) or response.status_code >= 500


def _retry_after(headers: httpx.Headers) -> float:
    """Seconds that the server asks to wait; 0 if it does not ask, or not for a positive time."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
    date = parsedate_tz(headers.get("retry-after", ""))
    return 0.0 if date is None else max(mktime_tz(date) - time.time(), 0.0)


def sdk_error(outcome: Outcome, request: httpx.Request) -> openai.APIError:
    """The exception that the SDK raises for a request that ended so."""
    if isinstance(outcome, TimeoutError):
        return openai.APITimeoutError(request=request)
    if not isinstance(outcome, httpx.Response):
        return openai.APIConnectionError(request=request)
    body: Any
    try:
        body = from_json(outcome.content)
    except ValueError:
        body = outcome.text.strip()
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else None
    status = outcome.status_code
    other = openai.InternalServerError if status >= 500 else openai.APIStatusError
    return _STATUS_ERRORS.get(status, other)(
        f"Error code: {status}" + (f" - {message}" if isinstance(message, str) and message else ""),
        response=outcome,
        body=error,
    )
