"""pytest plugin of ``make soak``: each test's row in the table of docs/soak.md.

A test that has a row says what it is by its marker: ``@pytest.mark.soak("F1", KILLS, "kills")``. A
row stays until the same test runs again, so that the whole may be run in several sessions.
"""

import os
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.seeds import VARIABLE
from tests.support.soak import share

PAGE = Path(__file__).parents[2] / "docs" / "soak.md"
COLUMNS = (
    *("id", "test", "how many", "share", "seed", "violations", "figures", "seconds", "UTC"),
    "load",
)
_BEGIN, _END = "<!-- rows of make soak -->", "<!-- end of rows -->"
_rows = pytest.StashKey[list[str]]()
_load = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_rows] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[_load] = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report: pytest.TestReport = yield
    marker = item.get_closest_marker("soak")
    named = marker.args if marker else ()  # without a name: pytest's own summary has its failures
    if named and not report.skipped and (report.when == "call" or report.failed):
        name, many = named[0], f"{named[1]:,} {named[2]}"
        printed = report.capstdout.splitlines()
        told = [line for line in printed if VARIABLE not in line]
        cells = {
            "id": name,
            "test": f"`{item.nodeid.removeprefix('tests/')}`",
            "how many": many,
            "share": f"{min(share(), 1):g}",
            "seed": " ".join(re.findall(rf"{VARIABLE}=(\d+)", report.capstdout)) or "-",
            "violations": "0" if report.passed else f"**{_why(call)}**",
            "figures": " ".join(told[-1:]) or "-",
            "seconds": f"{call.duration:,.0f}",
            "UTC": f"{datetime.fromtimestamp(call.start, UTC):%Y-%m-%d %H:%M}",
            "load": item.config.stash[_load],
        }
        row = _row(cells[column] for column in COLUMNS)
        item.config.stash[_rows].append(row)
        _write(cells["test"], row)
    return report


def _why(call: pytest.CallInfo[None]) -> str:
    return " ".join(call.excinfo.exconly().split())[:300] if call.excinfo else "failed"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(one.replace('|', '¦') for one in cells)} |"


def _write(test: str, row: str) -> None:
    """Into the page, at once: what comes later may be stopped."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    old, _, after = rest.partition(_END)
    lines = [line for line in old.splitlines() if line.startswith("| ")][1:]
    known = {line.split(" | ")[1]: line for line in lines} | {test: row}
    head = [_row(COLUMNS), "|---" * len(COLUMNS) + "|"]
    table = "\n".join([_BEGIN, "", *head, *sorted(known.values()), "", _END])
    PAGE.write_text(f"{before}{table}{after}")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if new := config.stash[_rows]:
        terminalreporter.section("what endured")
        for line in (_row(COLUMNS), *new):
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"It is in {PAGE}.")
