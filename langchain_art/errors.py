"""The errors of langchain-art: one tree, shared by the client and the server.

A message says what is wrong, what was got, what was expected and what to do next. On the wire an
error has OpenAI's shape, ``{"error": {"message", "type", "code", "param"}}``, where ``code`` is
the class attribute of that name, so that OpenAI's SDKs and our client both understand it.
"""

from __future__ import annotations

from typing import Any, ClassVar

#: Attribute of an error, of whatever class, with which a call of `ChatART` ended: true.
OF_OUR_CALL = "of_langchain_art_call"


class ArtError(Exception):
    """Base of every error that langchain-art raises on purpose."""

    code: ClassVar[str] = "art_error"

    def __init_subclass__(cls, *, code: str | None = None) -> None:
        cls.code = code or cls.code


class ConfigError(ArtError, ValueError, code="config_error"):
    """An option, a file or a combination of options makes no sense."""


class ServerUnreachable(ArtError, ConnectionError, code="server_unreachable"):
    """The server gave no answer within the allowed time. Retryable."""


class JobFailed(ArtError, code="job_failed"):
    """A training job ended in failure; the served adapter is unchanged."""


class RolloutFailed(ArtError, code="rollout_failed"):
    """More rollouts of a batch raised than the caller allowed."""


class JudgeError(ArtError, code="judge_error"):
    """A group could not be judged: the judge's replies cannot be used, or there was none.

    `Trainer` leaves the group out and counts it as ``groups.unjudged``; no score is guessed.
    """


class RequestRefused(ArtError, code="request_refused"):
    """The server answered, and the answer is no.

    Attributes:
        status: HTTP status code.
        param: the field of the request that is to blame, if one is.
        retry_after: seconds to wait before a retry, if a retry makes sense.
    """

    status: ClassVar[int] = 400

    def __init_subclass__(cls, *, code: str | None = None, status: int | None = None) -> None:
        super().__init_subclass__(code=code)
        cls.status = status or cls.status
        REFUSALS.setdefault(cls.code, cls)

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


#: wire code -> class, for turning an answer of the server back into its error.
REFUSALS: dict[str, type[RequestRefused]] = {RequestRefused.code: RequestRefused}


class InvalidRequest(RequestRefused, code="invalid_request"):
    """A field is missing, malformed, out of range, or not supported."""


class PromptTooLong(InvalidRequest, code="context_length_exceeded"):
    """The prompt does not fit the model's context. OpenAI's code for it is kept.

    "The prompt is too long" begins the message: by these words LangChain knows the error.
    """


class AuthenticationFailed(RequestRefused, code="invalid_api_key", status=401):
    """No API key was sent, or a wrong one."""


class PermissionDenied(RequestRefused, code="permission_denied", status=403):
    """The key is right, and lacks the scope that the route needs."""


class NotFound(RequestRefused, code="not_found", status=404):
    """No such trajectory, job or checkpoint."""


class MethodNotAllowed(RequestRefused, code="method_not_allowed", status=405):
    """The path is known, and does not take this method."""


class RequestTimeout(RequestRefused, code="request_timeout", status=408):
    """The request's body came too slowly. Retry."""


class UnknownModel(NotFound, code="model_not_found"):
    """No policy, version or base model of that name. OpenAI's code for it is kept."""


class Conflict(RequestRefused, code="conflict", status=409):
    """The same id or idempotency key was used before with another body."""


class BodyTooLarge(RequestRefused, code="body_too_large", status=413):
    """The request's body is over the server's limit."""


class Damaged(RequestRefused, code="damaged", status=500):
    """Stored data is not what the server wrote (the disk changed it), and is not used."""


class QuotaExceeded(RequestRefused, code="insufficient_quota", status=429):
    """A quota of the server is used up: waiting does not help. OpenAI's code for it is kept."""


class Overloaded(RequestRefused, code="overloaded", status=429):
    """A bounded queue is full. Retry after ``retry_after`` seconds."""


class RateLimitExceeded(Overloaded, code="rate_limit_exceeded"):
    """A limit of the key is reached. Retry after ``retry_after`` seconds. OpenAI's code for it."""


class EngineUnavailable(RequestRefused, code="engine_unavailable", status=503):
    """The sampler or the learner is starting or restarting. Retry after ``retry_after`` seconds."""
