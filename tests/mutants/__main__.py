"""Tries mutants: ``python -m tests.mutants [PART OF A NAME ...]``; all take a quarter of an hour.

The tests run in a copy of the tree: once as it is, and once for each mutant. Prints the first test
that failed with it, and exits with 1 if a mutant was not found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.mutants import ROOT, all_mutants


def _copy(to: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if (source := ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to / name)


def _first_failure(tree: Path, tests: Iterable[str]) -> str | None:
    """The first of the tests that fails; None: none does."""
    # No example that another mutant failed with is tried first.
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["-m", "not vllm and not skypilot", *dict.fromkeys(tests)]
    # Before what the virtual environment has installed, in the tests' child processes too.
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "server")])}
    ran = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        return None
    for line in ran.stdout.splitlines():
        if line.startswith(("FAILED tests/", "ERROR tests/")):
            return line.partition(" - ")[0][:200]
    raise RuntimeError(f"pytest ended with {ran.returncode}: {ran.stdout}{ran.stderr}")


def main(parts: list[str]) -> str | None:
    """Returns what is wrong; see the module."""
    chosen = [m for m in all_mutants() if not parts or any(part in m.name for part in parts)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        _copy(tree)
        if (failed := _first_failure(tree, (t for m in chosen for t in m.tests))) is not None:
            sys.exit(f"without a mutant: {failed}")
        for mutant in chosen:
            begun, file = time.monotonic(), tree / mutant.file
            original = file.read_text()
            file.write_text(mutant.applied(tree))
            found = _first_failure(tree, mutant.tests)
            file.write_text(original)
            missed += found is None
            seconds = time.monotonic() - begun
            sys.stdout.write(f"{mutant.name}: {found or 'NOT FOUND'} ({seconds:.0f} s)\n")
            sys.stdout.flush()
    return f"{missed} of {len(chosen)} were not found" if missed else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
