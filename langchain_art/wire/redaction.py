"""Secrets in texts, found by pattern: for logs and for what is shown, never for what is trained."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "[redacted]"
_SECRETS = re.compile(
    "|".join(
        [
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
            r"\bsk-[\w-]{16,}",  # OpenAI, Anthropic and their like
            r"\bgh[opsur]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}",
            r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
            r"\bAIza[\w-]{30,}|\bhf_\w{20,}|\bxox[abeoprs]-[\w-]{10,}|\blsv2_\w{20,}",
            r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+",  # JSON web tokens
            r"(?i:(?<=bearer )|(?<=basic ))[\w.~+/-]{16,}=*",
            r"(?<=://)[^\s/:@]+:[^\s/@]+(?=@)",  # of a URL
            r"""(?i:\b(?:password|passwd|secret|token|api[_-]?key)\b["']?\s*[:=]\s*["']?)"""
            r"""(?!\d+\b)[^\s"',;}]{6,}""",
        ]
    ),
    re.DOTALL,
)


def redact(text: str) -> str:
    """The text without what looks like a secret."""
    return _SECRETS.sub(REDACTED, text)


def redact_values(value: Any) -> Any:
    """A JSON value whose strings are redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [redact_values(one) for one in value]
    if isinstance(value, dict):
        return {name: redact_values(one) for name, one in value.items()}
    return value
