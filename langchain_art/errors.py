"""The errors of langchain-art: one tree, shared by the client and the server.

A message says what is wrong, what was got, what was expected and what to do next. On the wire an
error has OpenAI's shape, ``{"error": {"message", "type", "code", "param"}}``, where ``code`` is
the class attribute of that name, so that OpenAI's SDKs and our client both understand it.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ArtError(Exception):
    """Base of every error that langchain-art raises on purpose."""

    code: ClassVar[str] = "art_error"


class ConfigError(ArtError, ValueError):
    """An option, a file or a combination of options makes no sense."""

    code = "config_error"


class ServerUnreachable(ArtError, ConnectionError):
    """The server gave no answer within the allowed time. Retryable."""

    code = "server_unreachable"


class JobFailed(ArtError):
    """A training job ended in failure; the served adapter is unchanged."""

    code = "job_failed"


class RolloutFailed(ArtError):
    """More rollouts of a batch raised than the caller allowed."""

    code = "rollout_failed"


class JudgeError(ArtError):
    """A group could not be judged: the judge's replies cannot be used, or there was none.

    `Trainer` leaves the group out and counts it as ``groups.unjudged``; no score is guessed.
    """

    code = "judge_error"


class RequestRefused(ArtError):
    """The server answered, and the answer is no.

    Attributes:
        status: HTTP status code.
        param: the field of the request that is to blame, if one is.
        retry_after: seconds to wait before a retry, if a retry makes sense.
    """

    code = "request_refused"
    status: ClassVar[int] = 400

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """This error in OpenAI's shape."""
        return {
            "error": {
                "message": str(self),
                "type": "server_error" if self.status >= 500 else "invalid_request_error",
                "code": self.code,
                "param": self.param,
            }
        }


class InvalidRequest(RequestRefused):
    """A field is missing, malformed, out of range, or not supported."""

    code = "invalid_request"


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the model's context. OpenAI's code for it is kept."""

    code = "context_length_exceeded"


class AuthenticationFailed(RequestRefused):
    """No API key was sent, or a wrong one."""

    code = "invalid_api_key"
    status = 401


class NotFound(RequestRefused):
    """No such trajectory, job or checkpoint."""

    code = "not_found"
    status = 404


class UnknownModel(NotFound):
    """No policy, version or base model of that name. OpenAI's code for it is kept."""

    code = "model_not_found"


class Conflict(RequestRefused):
    """The same id or idempotency key was used before with another body."""

    code = "conflict"
    status = 409


class BodyTooLarge(RequestRefused):
    """The request's body is over the server's limit."""

    code = "body_too_large"
    status = 413


class Overloaded(RequestRefused):
    """A bounded queue is full. Retry after ``retry_after`` seconds."""

    code = "overloaded"
    status = 429


class EngineUnavailable(RequestRefused):
    """The sampler or the learner is starting or restarting. Retry after ``retry_after`` seconds."""

    code = "engine_unavailable"
    status = 503


def _refusals(root: type[RequestRefused]) -> dict[str, type[RequestRefused]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _refusals(child)
    return found


#: wire code -> class, for turning an answer of the server back into its error.
REFUSALS: dict[str, type[RequestRefused]] = _refusals(RequestRefused)
