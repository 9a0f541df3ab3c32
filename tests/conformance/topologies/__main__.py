"""``python -m tests.conformance.topologies``: runs the suite and writes ``docs/topologies.md``."""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conformance.topologies import table
from tests.support import soak


class Proofs:
    """A pytest plugin that counts what each test has shown."""

    def __init__(self) -> None:
        self.proved: Counter[tuple[str, str]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.proved.update(value for name, value in report.user_properties if name == "proved")


if __name__ == "__main__":
    os.environ[soak.VARIABLE] = "1"  # every mode
    # It loads the topologies. With `-n`, other processes run them, and this one writes the page.
    importlib.import_module(f"{__package__}.test_topologies")
    proofs = Proofs()
    # The page is what this run makes anew, so the test that compares the two is left out.
    suite = [str(Path(__file__).with_name("test_topologies.py")), "-k", "not page"]
    code = pytest.main(["-q", "-p", "no:cacheprovider", *suite, *sys.argv[1:]], plugins=[proofs])
    table.write(proofs.proved)
    sys.exit(code)
