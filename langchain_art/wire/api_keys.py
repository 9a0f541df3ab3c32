"""The server's API key: how one is made, and why another one is refused."""

from __future__ import annotations

import secrets
import zlib

_RANDOM_BYTES = 32
#: Characters that 32 random bytes have in base64, the shortest form in use.
_SHORTEST = 43


def new_api_key() -> str:
    """A key of 32 random bytes, for URLs and shells as it is."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def new_tenant_key() -> str:
    """A key of 32 random bytes that a server makes: redaction knows its form."""
    return f"sk-art-{new_api_key()}"


def key_problem(key: str) -> str | None:
    """Why a key is refused, in words; None if it may be of 32 random bytes.

    What compresses to fewer bytes than that was made of fewer.
    """
    if len(key) < _SHORTEST:
        got = f"{len(key)} characters"
    elif len(zlib.compress(key.encode(), wbits=-15)) < _RANDOM_BYTES:
        got = f"{len(key)} characters that repeat"
    else:
        return None
    return (
        f"got a key of {got}, expected at least {_RANDOM_BYTES} random bytes, which are "
        f"{_SHORTEST} characters; make one with: langchain-art key new"
    )
