"""Tests that need the same environment at once, as threads or processes, get one whole one."""

from __future__ import annotations

import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import environments


def wheel(folder: Path) -> Path:
    """A package `probe`, as pip installs it."""
    path = folder / "probe-1.0-py3-none-any.whl"
    info = "probe-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("probe/__init__.py", "says = 'here'\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def test_those_who_come_together_share_what_the_first_one_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "HOMES", tmp_path / "homes")
    made: list[Path] = []
    run = environments._run

    def counted(argv: list[str], home: Path) -> None:
        made.append(home)
        run(argv, home)

    monkeypatch.setattr(environments, "_run", counted)
    wanted = ["--no-deps", "--no-index", str(wheel(tmp_path))]

    def use(_: int) -> tuple[Path, str]:
        python = environments.environment("probe", wanted)
        says = [str(python), "-c", "import probe; print(probe.says)"]
        return python, subprocess.run(says, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(use, range(3)))

    assert {said for _, said in found} == {"here\n"}
    assert {python.parents[1] for python, _ in found} == set(made)
    assert len(made) == 1
