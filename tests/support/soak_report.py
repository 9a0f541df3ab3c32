"""pytest plugin of ``make soak``: each test's row in the table of docs/soak.md.

A test says what it is by its marker: ``@pytest.mark.soak("F1", KILLS, "kills")``. A row stays until
the same test runs again, so that the whole may be run in several sessions.
"""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.seeds import VARIABLE
from tests.support.soak import share

PAGE = Path(__file__).parents[2] / "docs" / "soak.md"
HEAD = (
    "| id | test | how many | share | seed | violations | figures | seconds | UTC | cores | load |"
)
_RULE = "|---" * HEAD.count(" | ") + "|---|"
_BEGIN, _END = "<!-- rows of make soak -->", "<!-- end of rows -->"
rows = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[rows] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report: pytest.TestReport = yield
    marker = item.get_closest_marker("soak")
    if marker is not None and not report.skipped and (report.when == "call" or report.failed):
        name, many, what = (*marker.args, "", "", "")[:3]
        seeds = re.findall(rf"{VARIABLE}=(\d+)", report.capstdout)
        said = "0"
        if report.failed and call.excinfo is not None:
            said = " ".join(f"**{call.excinfo.exconly()}".split())[:300].replace("|", "¦") + "**"
        begun = datetime.fromtimestamp(call.start, UTC)
        cells = [name or "-", f"`{item.nodeid.removeprefix('tests/')}`", f"{many:,} {what}".strip()]
        if not many:
            cells[2] = "-"
        printed = [one for one in report.capstdout.splitlines() if VARIABLE not in one]
        figures = " ".join(printed[-1:])[:300].replace("|", "¦")
        cells += [f"{min(share(), 1):g}", " ".join(seeds) or "-", said, figures or "-"]
        cells += [f"{call.duration:,.0f}", f"{begun:%Y-%m-%d %H:%M}"]
        cells += [str(os.cpu_count()), item.config.stash[_load].get(item.nodeid, "-")]
        item.config.stash[rows][cells[1]] = "| " + " | ".join(cells) + " |"
    return report


_load = pytest.StashKey[dict[str, str]]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    loads = item.config.stash.setdefault(_load, {})
    loads[item.nodeid] = f"{os.getloadavg()[0]:.1f}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not (new := config.stash[rows]):
        return
    terminalreporter.section("what endured")
    for line in (HEAD, *new.values()):
        terminalreporter.write_line(line)
    page = PAGE.read_text()
    before, _, rest = page.partition(_BEGIN)
    old, _, after = rest.partition(_END)
    known = {line.split(" | ")[1]: line for line in old.splitlines() if line.startswith("| ")}
    known.pop("test", None)
    lines = sorted((known | new).values())
    table = "\n".join([_BEGIN, "", HEAD, _RULE, *lines, "", _END])
    PAGE.write_text(f"{before}{table}{after}")
    terminalreporter.write_line(f"written into {PAGE}")
