"""Traces are off unless they are wanted, and say what they need."""

from __future__ import annotations

import subprocess
import sys

import pytest

from langchain_art.errors import ConfigError
from langchain_art_server.telemetry.job_watch import open_traces


def test_nothing_is_imported_for_them_while_they_are_off() -> None:
    code = (
        "import sys, langchain_art_server.__main__\n"
        "from langchain_art_server.telemetry.job_watch import open_traces\n"
        "assert open_traces(False) is None\n"
        "print(sorted(n for n in sys.modules if n.startswith('opentelemetry.sdk')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "langchain_art_server.telemetry.otel_spans", raising=False)
    for name in [one for one in sys.modules if one.startswith("opentelemetry.sdk")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(ConfigError, match=r"pip install \"langchain-art\[otel\]\""):
        open_traces(True)
