"""How long the page takes in a browser with 100,000 runs of 12 calls stored, and what it costs.

A real server over a database that was filled before it started (`benchmarks.browsing.fill`): runs,
their call records, the steps of a fit, reviews. ``overview_seconds`` (a curve is drawn),
``first_page_seconds`` (rows are there), ``run_seconds`` (the tokens of a call of the run of 200
calls and 100,000 tokens) are those of chromium, from the address to the content, each with a
browser context that has nothing cached; medians of nine. ``filter_seconds``: in a page that shows
an empty list, from the change of the address to the rows of the filter; the slowest of all filters,
each the median of five.

``viewers_calls_ratio``: see `benchmarks.browsing.slowed`. The database has the 100,000 runs then,
too.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Browser, Page

from benchmarks.browsing.fill import fill, long_run
from benchmarks.browsing.slowed import slowed
from langchain_art_server.config import sqlite_url
from langchain_art_server.storage.store import Store
from tests.support.browser import running_browser
from tests.support.live_server import LiveServer

RUNS, TIMES, FILTER_TIMES = 100_000, 9, 5
LONG, LONG_CALLS, LONG_TOKENS = "long-run", 200, 500
#: Queries of the list's address, as its form makes them.
FILTERS: dict[str, dict[str, Any]] = {
    "policy": {"policy": "writer"},
    "rare policy": {"policy": "rare"},
    "version": {"version": "writer@7"},
    "scenario": {"scenario": "s-77"},
    "node": {"node": "critic"},
    "status": {"status": "failed"},
    "low reward": {"reward_max": 0.001},
    "score": {"score": "ruler", "score_min": 0.999},
    "text": {"text": "word77"},
    "rare text": {"text": "needle"},
    "common text": {"text": "question"},
    "unreviewed": {"reviewed": "false"},
    "reviewed": {"reviewed": "true"},
    "learned by step": {"step": 77},
    "by reward": {"order": "reward"},
    "failed by reward": {"order": "reward", "status": "failed"},
    "policy, slowest first": {"order": "seconds", "policy": "writer"},
    "node by reward": {"order": "reward", "node": "critic"},
    "rare policy by tokens": {"order": "tokens", "policy": "rare"},
    "by score": {"order": "score", "score": "ruler"},
    "text by reward": {"order": "reward", "text": "word77"},
}


async def write_runs(url: str, runs: int) -> dict[str, object]:
    store = Store(url)
    begun = time.monotonic()
    await fill(store, runs)
    run, records = long_run(LONG, LONG_CALLS, LONG_TOKENS)
    await store.add_calls(records)
    await store.add_trajectories([run])
    calls, stored, jobs = await store.counts()
    size = await store.size()
    store.close()
    about: dict[str, object] = {"runs": stored, "calls": calls, "jobs": jobs}
    return about | {
        "seconds_to_fill": round(time.monotonic() - begun),
        "database_mib": round(size / 2**20),
    }


def shown(browser: Browser, address: str, content: str) -> float:
    """The median of `TIMES` times, until an element `content` of a page is there."""
    taken: list[float] = []
    for _ in range(TIMES):
        context = browser.new_context()
        page = context.new_page()
        begun = time.perf_counter()
        page.goto(address)
        page.wait_for_selector(content)
        taken.append(time.perf_counter() - begun)
        context.close()
    return statistics.median(taken)


def filtered(page: Page, query: dict[str, Any]) -> float:
    """The seconds from the address of a filter to its rows, in a page that shows an empty list."""
    page.evaluate("location.hash = '#/runs?scenario=none'")
    page.get_by_text("No run is as you ask").wait_for()
    return page.evaluate(
        """async (query) => {
          const begun = performance.now();
          location.hash = `#/runs?${query}`;
          for (;;) {
            await new Promise(requestAnimationFrame);
            if (document.querySelector("tbody tr")) return (performance.now() - begun) / 1000;
          }
        }""",
        urlencode(query),
    )


def measure(data: Path) -> tuple[dict[str, float], dict[str, object]]:
    """The seconds in chromium, and those of each filter, with a server over a filled directory."""
    server = LiveServer(data).start()
    try:
        with running_browser() as browser:
            figures = {
                "overview_seconds": shown(browser, f"{server.root}/#/overview", ".curve canvas"),
                "first_page_seconds": shown(browser, f"{server.root}/#/runs", "tbody tr"),
                "run_seconds": shown(browser, f"{server.root}/#/runs/{LONG}?call=9", ".token"),
            }
            page = browser.new_page()
            page.goto(f"{server.root}/#/runs")
            filters = {
                name: statistics.median(filtered(page, query) for _ in range(FILTER_TIMES))
                for name, query in FILTERS.items()
            }
    finally:
        server.stop()
    slowest = max(filters, key=lambda name: filters[name])
    about: dict[str, object] = {name: round(taken, 4) for name, taken in filters.items()}
    figures["filter_seconds"] = filters[slowest]
    return figures, {"slowest_filter": slowest, "filters": about}


def run(runs: int = RUNS) -> tuple[dict[str, float], dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        about = asyncio.run(write_runs(sqlite_url(data), runs))
        figures, more = measure(data)
        ratio, of_viewers = slowed(data)
    return figures | ratio, about | more | of_viewers
