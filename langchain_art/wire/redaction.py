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
            r"\bart-run\.[\w.-]{64,}",
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


#: Entries of mappings whose text is a secret, as after ``name=`` in a text.
_NAMES = re.compile(r"(?:^|[_-])(?:password|passwd|secret|token|api[_-]?key)$", re.IGNORECASE)
_SHORTEST = 6
#: A text without any of these, its case folded, has nothing that a pattern finds: to look for them
#: costs a hundredth of the patterns.
_SIGNS = (
    *("private key-", "sk-", "art-run.", "github_pat_", "glpat-"),
    *("ghp_", "gho_", "ghs_", "ghu_", "ghr_"),
    *("akia", "asia", "aiza", "hf_", "xox", "lsv2_", "eyj", "bearer ", "basic ", "://"),
    *("password", "passwd", "secret", "token", "apikey", "api_key", "api-key"),
)


def redact(text: str) -> str:
    """The text without what looks like a secret."""
    return Redactor().text(text)


def redact_values(value: Any) -> Any:
    """A JSON value whose strings are redacted."""
    return Redactor().value(value)


class Redactor:
    """Redacts, and counts what it has redacted."""

    def __init__(self) -> None:
        self.count = 0
        """Secrets so far."""

    def text(self, text: str) -> str:
        """The text without what looks like a secret."""
        plain = text.casefold()
        for sign in _SIGNS:  # `any` would cost twice as much
            if sign in plain:
                break
        else:
            return text
        found, times = _SECRETS.subn(REDACTED, text)
        self.count += times
        return found

    def value(self, value: Any) -> Any:
        """A JSON value whose strings are redacted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(one) for one in value]
        if isinstance(value, dict):
            return {name: self._named(name, one) for name, one in value.items()}
        return value

    def _named(self, name: Any, value: Any) -> Any:
        """The value of an entry whose name may tell that it is a secret."""
        if isinstance(value, str) and isinstance(name, str) and _NAMES.search(name):
            if len(value) >= _SHORTEST and not value.isdigit():
                self.count += 1
                return REDACTED
            return value
        return self.value(value)
