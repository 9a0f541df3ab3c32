"""The log as lines of text or of JSON, without secrets."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from langchain_art.wire.redaction import redact, redact_values
from langchain_art_server.telemetry.log_context import current, without_keys


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
        if (context := current()) is not None:
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
