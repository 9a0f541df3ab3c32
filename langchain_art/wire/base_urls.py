"""A server's address, `base_url`, which ends with ``/v1``; and what to say where none is there."""

from __future__ import annotations

from langchain_art.errors import ConfigError

DEFAULT_BASE_URL = "http://localhost:8000/v1"
#: Characters of a foreign answer that a message shows.
_EXCERPT = 100


def split_base_url(base_url: str) -> tuple[str, str]:
    """``(base_url ending with /v1, the server's root)``; a ConfigError if it is no http(s) URL."""
    trimmed = base_url.rstrip("/")
    if not trimmed.startswith(("http://", "https://")):
        raise ConfigError(
            f"base_url: got {base_url!r}, expected a URL such as {DEFAULT_BASE_URL!r}"
        )
    root = trimmed.removesuffix("/v1")
    return f"{root}/v1", root


def with_v1(base_url: str | None) -> str | None:
    """The address with ``/v1`` at its end. Raises ConfigError."""
    return None if base_url is None else split_base_url(base_url)[0]


def no_answer(base_url: str, why: str) -> str:
    """Message for where a server does not answer."""
    return (
        f"No answer from {base_url}: {why}. Start a server with `langchain-art serve MODEL`, or "
        "point base_url (or ART_BASE_URL) at one that runs."
    )


def foreign_answer(url: object, status: int, kind: str | None, text: str) -> str:
    """Message for an answer that is not of a langchain-art server: a page of HTML, say."""
    excerpt = " ".join(text.split())[:_EXCERPT]
    said = f" It begins: {excerpt}" if excerpt else ""
    return (
        f"{url} answered {status} with {kind or 'no content type'}, which no langchain-art server "
        "does. Point base_url (or ART_BASE_URL) at one: `langchain-art serve` prints its address "
        f"when it is ready.{said}"
    )
