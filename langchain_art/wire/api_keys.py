"""API keys: how one is made and why one is refused; tenant, scopes, limits; what they did."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import zlib
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from langchain_art.wire.field_hints import Options
from langchain_art.wire.identifiers import Finite, ScenarioName, Several, Wire

_RANDOM_BYTES = 32
#: Characters that 32 random bytes have in base64, the shortest form in use.
_SHORTEST = 43
Scope = Literal["infer", "submit", "review", "metrics", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
#: The tenant of ART_API_KEY, and of a server without a key.
DEFAULT_TENANT = "default"
#: A tenant's name is a directory's, and in PostgreSQL a schema's.
_RUN_KEY = re.compile(r"art-run\.([0-9a-f]{16})\.([0-9]{1,12})\.([\w-]{1,1024})\.[0-9a-f]{64}")
_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_AtLeastOne = Annotated[int, Field(ge=1, le=2**53)]


def _tenant(value: str) -> str:
    if not _TENANT.fullmatch(value):
        raise ValueError(
            f"got the tenant {value[:80]!r}, expected 1-40 characters from a-z 0-9 - "
            "that begin with a letter or a digit"
        )
    return value


def _distinct(scopes: tuple[Scope, ...]) -> tuple[Scope, ...]:
    return tuple(one for one in SCOPES if one in scopes)


TenantName = Annotated[str, AfterValidator(_tenant)]


class KeyLimits(Options):
    """Limits of one key. None: no limit but the server's own."""

    calls_per_minute: _AtLeastOne | None = None
    """Completions that begin: a request for ``n`` choices is ``n`` calls."""
    tokens_per_minute: _AtLeastOne | None = None
    """Tokens of prompts and replies. They are counted when a call ends, so calls at once may take
    more than are left; what was taken too much is waited for."""
    concurrent_calls: _AtLeastOne | None = None
    stored_bytes: _AtLeastOne | None = None
    """Bytes of the tenant's database and adapters. Beyond, the key adds nothing more to them."""


class KeySpec(Options):
    """Body of ``POST /v1/keys``."""

    name: Annotated[ScenarioName, Field(min_length=1, max_length=128)]
    """Name for people: whose it is, or what for."""
    tenant: TenantName = DEFAULT_TENANT
    """Tenant whose runs, policies, calls and jobs it reaches; a new name is a new tenant."""
    scopes: Annotated[Several[Scope], Field(min_length=1), AfterValidator(_distinct)] = (
        "infer",
        "submit",
        "review",
    )
    limits: KeyLimits = KeyLimits()
    expires_at: Finite | None = None
    """Seconds since the epoch from which on it is refused; None: never."""


class ApiKey(KeySpec):
    """A key that was made. The key itself was shown once, and is not known to the server."""

    id: str
    created_at: float
    revoked_at: float | None = None


class NewApiKey(ApiKey):
    """The answer of ``POST /v1/keys``."""

    key: str
    """The key itself, which is shown nowhere else and never again."""


class LoggedAction(Wire):
    """One entry of the server's log of who did what."""

    number: int
    at: float
    """Seconds since the epoch."""
    tenant: str
    key: str | None
    """The id of the key; ``ART_API_KEY`` for the server's own, None for a server without one."""
    action: str
    """``trained``, ``cancelled``, ``rolled_back``, ``deleted_policy``, ``deleted_version``,
    ``deleted_run``, ``reviewed``, ``made_key``, ``revoked_key``."""
    subject: str
    """Subject of the action: a job and its policy, a version, a run, reviews, a key."""


RUN_KEY = "art-run."
"""Prefix of the key of one run."""


@dataclass(frozen=True)
class RunKey:
    """The key of one run, for a program that can set nothing but a key: its calls are of the run.

    It holds the run, its end, which key it was made of, and an HMAC-SHA256 of the three (RFC 2104).
    That is keyed by the hash of that key, which the server has, too: nothing is stored for it, and
    with that key it is revoked.
    """

    text: str
    made_of: str
    """The first 16 hexadecimal digits of the SHA-256 of that key's hash."""
    ends: int
    """Seconds since the epoch from which on it is refused."""
    run: str

    @classmethod
    def of(cls, key: str, run: str, ends: float) -> RunKey:
        """The key of a run that is made of `key`."""
        digest = hashlib.sha256(key.encode()).digest()
        run64 = base64.urlsafe_b64encode(run.encode()).decode().rstrip("=")
        signed = f"{RUN_KEY}{key_mark(digest)}.{int(ends)}.{run64}"
        return cls(f"{signed}.{_signature(digest, signed)}", key_mark(digest), int(ends), run)

    @classmethod
    def read(cls, text: str) -> RunKey | None:
        """The key that `text` is; None: it has not that form."""
        if not (found := _RUN_KEY.fullmatch(text)):
            return None
        try:
            run = base64.urlsafe_b64decode(found[3] + "=" * (-len(found[3]) % 4)).decode()
        except ValueError:
            return None
        return cls(text, found[1], int(found[2]), run)

    def is_of(self, digest: bytes) -> bool:
        """True if it was made of the key with this SHA-256."""
        signed, _, signature = self.text.rpartition(".")
        return secrets.compare_digest(_signature(digest, signed), signature)


def key_mark(digest: bytes) -> str:
    """The mark, in a run's key, of the key with the SHA-256 `digest`, which it was made of."""
    return hashlib.sha256(digest).hexdigest()[:16]


def _signature(digest: bytes, signed: str) -> str:
    return hmac.new(digest, signed.encode(), "sha256").hexdigest()


def new_api_key() -> str:
    """A key of 32 random bytes, for URLs and shells as it is."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def new_tenant_key() -> str:
    """A key of 32 random bytes that a server makes: redaction knows its form."""
    return f"sk-art-{new_api_key()}"


def key_problem(key: str) -> str | None:
    """Reason why a key is refused, in words; None if it may be of 32 random bytes.

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
