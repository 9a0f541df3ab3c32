"""``python -m tests.conformance.topologies``: writes ``docs/topologies.md`` of the topologies."""

from __future__ import annotations

import importlib

from tests.conformance.topologies import table

if __name__ == "__main__":
    importlib.import_module(f"{__package__}.test_topologies")  # it loads them
    table.PAGE.write_text(table.page())
