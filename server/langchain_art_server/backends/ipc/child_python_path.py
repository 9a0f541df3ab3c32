"""PYTHONPATH for a child that runs the Python of another environment.

This package is not installed there: the child imports the server's own copy, so both ends are of
one version, and nothing else of the server's environment is visible to it.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from pathlib import Path

import langchain_art
import langchain_art_server


class ChildPythonPath:
    """A folder with links to the two packages, for as long as this object lives.

    Args:
        python: that the child runs.

    Attributes:
        env: for the child's environment; empty if the Python is the server's own.
    """

    def __init__(self, python: Path) -> None:
        self.env: dict[str, str] = {}
        if python == Path(sys.executable):
            return
        self._folder = tempfile.TemporaryDirectory(prefix="art-packages-")
        for package in (langchain_art, langchain_art_server):
            home = Path(inspect.getfile(package)).resolve().parent
            Path(self._folder.name, home.name).symlink_to(home, target_is_directory=True)
        rest = os.environ.get("PYTHONPATH")
        self.env["PYTHONPATH"] = os.pathsep.join([self._folder.name, *([rest] if rest else [])])
