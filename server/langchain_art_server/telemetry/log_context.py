"""The log: lines of text or JSON without secrets; fields of the request or job of a record."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from langchain_art.wire.redaction import REDACTED, redact, redact_values

#: A request id that is taken from a caller: as ids on the wire, and no longer than others.
_GIVEN = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
#: What `new_api_key` makes: 32 random bytes in base64.
_KEY = re.compile(
    r"(?<![\w-])(?=[\w-]{43}(?![\w-]))(?=[\w-]*[A-Z])(?=[\w-]*[a-z])(?=[\w-]*\d)[\w-]{43}", re.ASCII
)
#: Fields of records, and those that parameters of paths are.
_FIELDS = ("request_id", "tenant", "key", "policy", "run_id", "call_id", "job_id")
_OF_PATHS = {"trajectory_id": "run_id", "call_id": "call_id", "job_id": "job_id", "name": "policy"}


@dataclass(slots=True)
class LogContext:
    """The facts of one request, or of one job while it runs. None: absent, or not known yet."""

    request_id: str | None = None
    tenant: str | None = None
    key: str | None = None
    """The id of the API key, never the key."""
    policy: str | None = None
    run_id: str | None = None
    call_id: str | None = None
    job_id: str | None = None
    refused: str | None = None
    """The code of the error that the request was answered with."""
    model: str | None = None
    """Model that answered: a version, or the base model."""
    input_tokens: int = 0
    """Tokens of a call's prompt."""
    output_tokens: int = 0
    """Tokens of all its choices' replies."""
    finish_reasons: tuple[str, ...] = ()
    """Finish reasons of the choices."""
    path_params: Mapping[str, Any] | None = None
    """Parameters of the route that answers."""

    def fields(self) -> dict[str, str]:
        """Known fields, for a record; without a key that stood in a wrong place."""
        known: dict[str, str | None] = {name: getattr(self, name) for name in _FIELDS}
        found = {name: value for name, value in known.items() if value is not None}
        for given, value in (self.path_params or {}).items():
            if (name := _OF_PATHS.get(given)) is not None:
                found.setdefault(name, str(value)[:128])
        return {name: without_keys(redact(value)) for name, value in found.items()}


#: The context of the code that runs; None outside of requests and jobs.
CURRENT: ContextVar[LogContext | None] = ContextVar("log_context", default=None)


def without_keys(text: str) -> str:
    """The text without what may be the key of a server."""
    return _KEY.sub(REDACTED, text)


def request_id_of(given: bytes | None) -> str:
    """The id of a request: that of its ``x-request-id`` if it is well-formed, else a new one."""
    if given is not None and _GIVEN.fullmatch(given):
        return given.decode("ascii")
    return f"req-{random.getrandbits(96):024x}"


class TextLines(logging.Formatter):
    """Shows no secret that a message or a traceback holds."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with its traceback."""
        return without_keys(redact(super().format(record)))


class JsonLines(logging.Formatter):
    """A record as one JSON object on one line, without secrets.

    It has ``time`` (UTC), ``level``, ``logger`` and ``message``; ``exception`` with the traceback;
    what is known of the request or the job (`LogContext.fields`), and the record's own ``fields``
    (``extra={"fields": {…}}``).
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        time = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (context := CURRENT.get()) is not None:
            line |= context.fields()
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return without_keys(json.dumps(redact_values(line), default=str))


def log_as_json(level: int | str = logging.WARNING) -> None:
    """Have this process's log, with Python's warnings, written to standard error as `JsonLines`."""
    logging.captureWarnings(True)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
