"""The Python that an environment of another version is made with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.environments import interpreter


def test_a_python_on_the_path_is_taken_if_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    python = tmp_path / "python3.99"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert interpreter("3.99") == python


def test_one_that_does_not_run_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\nexit 127\n")  # as pyenv's, where the version is not switched on
    shim.chmod(0o755)
    with pytest.raises(FileNotFoundError, match=r"expected Python 3\.99"):
        interpreter("3.99")
