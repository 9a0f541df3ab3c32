"""`langchain_art.evaluators`: what it exports, and that importing it loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from langchain_art import evaluators


def test_every_exported_name_is_there() -> None:
    for name in evaluators.__all__:
        assert getattr(evaluators, name) is not None
        assert name in dir(evaluators)
    with pytest.raises(AttributeError, match="Nonsense"):
        evaluators.Nonsense  # noqa: B018


def test_importing_it_loads_no_judge_and_no_integration() -> None:
    code = "import sys, langchain_art.evaluators; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"litellm", "langfuse", "langsmith", "langchain_core", "langgraph", "openevals"}
    assert heavy.isdisjoint(done.stdout.splitlines())
