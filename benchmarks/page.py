"""How long the page's lists and runs take, with 100,000 runs of 12 calls stored.

A real server over a database that was filled before it started. ``…_shown_seconds`` are those of
chromium, from the address to the content, with a browser context that has nothing cached; the
others those of one client over HTTP, from the request to the whole answer. Medians of nine times.
Each list is asked for its first page of 50. The runs are written through the store, a hundred in a
transaction; their calls are turns with texts. Only the run of 200 calls and 100,000 tokens has call
records too, which no list reads.

``filter_seconds`` is that of the slowest filter, by name in the conditions; ``run_seconds`` is for
all that a run's page asks: the run with its audit, and the tokens of its longest call.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser

from langchain_art.wire import CallTags, Trajectory, Turn, Usage
from langchain_art_server.config import sqlite_url
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import CallRecord
from tests.support.browser import running_browser
from tests.support.live_server import LiveServer

RUNS, CALLS, TIMES, AT_ONCE = 100_000, 12, 9, 100
LONG, LONG_CALLS, LONG_TOKENS = "long-run", 200, 500
WORDS = [f"word{number}" for number in range(5000)]
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
    "nothing": {"policy": "rare", "text": "needle word1", "status": "failed"},
    "by reward": {"sort": "reward"},
    "failed by reward": {"sort": "reward", "status": "failed"},
    "rare policy by tokens": {"sort": "tokens", "policy": "rare"},
    "by score": {"sort": "score", "score": "ruler"},
}


def said(draw: random.Random, first: str) -> str:
    return " ".join([first, *draw.choices(WORDS, k=20)])


def run_of(number: int) -> Trajectory:
    draw = random.Random(number)
    policy = "rare" if number % 20_011 == 0 else "writer"
    turns = [
        Turn(
            call_id=f"call-{number}-{index}",
            node=("plan", "search", "critic", "write")[index % 4],
            model=f"{policy}@{number * 20 // RUNS}",
            extends=index - 1 if index else None,
            messages=(
                {"role": "user", "content": f"question {' '.join(draw.choices(WORDS, k=20))}"},
            ),
            reply={"role": "assistant", "content": said(draw, "answer")},
            usage=Usage(prompt_tokens=100, completion_tokens=draw.randrange(20, 200)),
            started_at=1.7e9 + number + index,
            latency=0.5,
        )
        for index in range(CALLS)
    ]
    return Trajectory(
        id=f"run-{number}",
        scenario=f"s-{number // 8 % 1000}",
        turns=tuple(turns),
        input="needle" if number == 31_337 else None,
        reward=draw.random(),
        scores={"ruler": draw.random(), "tests": float(draw.random() < 0.5)},
        status="failed" if draw.random() < 0.05 else "completed",
    )


def long_run() -> tuple[Trajectory, list[CallRecord]]:
    draw = random.Random(0)
    records: list[CallRecord] = []
    prompt: list[int] = []
    for index in range(LONG_CALLS):
        prompt = [*prompt, *draw.choices(range(50, 300), k=20)] if index % 10 else [index + 50]
        sampled = draw.choices(range(50, 300), k=LONG_TOKENS)
        records.append(
            CallRecord(
                id=f"{LONG}-{index}",
                created_at=1.7e9 + index,
                policy="tiny",
                version=0,
                model="tiny@0",
                tags=CallTags(trajectory_id=LONG, node="writer"),
                request={"messages": [{"role": "user", "content": "Go on."}]},
                reply={"role": "assistant", "content": "text " * LONG_TOKENS},
                prompt_token_ids=prompt,
                token_ids=sampled,
                logprobs=[-draw.random() for _ in sampled],
                temperature=1.0,
                finish_reason="stop",
                excluded_because=None,
                latency=0.5,
                began=index,
            )
        )
        prompt = [*prompt, *sampled]
    turns = tuple(
        Turn(
            call_id=one.id,
            node="writer",
            model=one.model,
            extends=index - 1 if index % 10 else None,
            messages=tuple(one.request["messages"]),
            reply=one.reply,
            usage=Usage(
                prompt_tokens=len(one.prompt_token_ids), completion_tokens=len(one.token_ids)
            ),
        )
        for index, one in enumerate(records)
    )
    return Trajectory(id=LONG, scenario="long", turns=turns, reward=1.0), records


async def fill(url: str) -> dict[str, float]:
    store = Store(url)
    begun = time.monotonic()
    for start in range(0, RUNS, AT_ONCE):
        await store.add_trajectories([run_of(number) for number in range(start, start + AT_ONCE)])
    seconds = time.monotonic() - begun
    run, records = long_run()
    await store.add_calls(records)
    await store.add_trajectories([run])
    size = await store.size()
    store.close()
    return {"seconds_to_fill": round(seconds), "database_mib": round(size / 2**20)}


def seconds(http: httpx.Client, *paths: str, **query: Any) -> float:
    """The median of `TIMES` times, of one request behind the other."""
    taken: list[float] = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        for path in paths:
            http.get(path, params=query).raise_for_status()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


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


def measure(data: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The figures, and the seconds of each filter, of a server over a filled directory."""
    server = LiveServer(data).start()
    try:
        with server.http() as http:
            filters = {
                name: seconds(http, "/page/runs", **asked) for name, asked in FILTERS.items()
            }
            figures = {
                "first_page_seconds": seconds(http, "/page/runs"),
                "names_seconds": seconds(http, "/page/run-names"),
                "filter_seconds": max(filters.values()),
                "run_seconds": seconds(http, f"/page/runs/{LONG}", f"/page/calls/{LONG}-9/tokens"),
            }
        with running_browser() as browser:
            rows, tokens = f"{server.root}/#/runs", f"{server.root}/#/runs/{LONG}?call=9"
            figures["first_page_shown_seconds"] = shown(browser, rows, "tbody tr")
            figures["run_shown_seconds"] = shown(browser, tokens, ".token")
    finally:
        server.stop()
    return figures, {name: round(taken, 4) for name, taken in filters.items()}


def run() -> tuple[dict[str, float], dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        about = asyncio.run(fill(sqlite_url(data)))
        figures, filters = measure(data)
    return figures, {**about, "filters": filters}
