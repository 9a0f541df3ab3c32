"""What a person sees of a fit while it trains, and what a review of theirs teaches."""

import asyncio
import re
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from examples.email_search.train import make_rollout
from langchain_art import ChatART, Trainer
from tests.support.browser import Watched
from tests.support.live_server import LiveServer
from tests.support.mails import mails_of

STEPS, GROUPS, RUNS = 4, 2, 4
#: Notes when each run is first seen in tables of the page, in seconds since the epoch.
WATCH = """(labels) => {
  window.seen = {};
  const links = labels.map((label) => `[aria-label="${label}"] a.run-id`).join(", ");
  const look = () => {
    for (const link of document.querySelectorAll(links)) {
      window.seen[link.textContent] ??= Date.now() / 1000;
    }
  };
  new MutationObserver(look).observe(document.body, { childList: true, subtree: true });
}"""


def seen(page: Page, run: str) -> float:
    """When the page first showed a run; waits for it."""
    page.wait_for_function("run => window.seen[run]", arg=run)
    return page.evaluate("run => window.seen[run]", run)


def test_a_demo_fit_is_watched(watched: Watched, art_server: LiveServer, tmp_path: Path) -> None:
    policy, ended = f"demo-{uuid.uuid4().hex[:8]}", dict[str, float]()
    mails = mails_of(tmp_path, STEPS * GROUPS, 1)
    model = ChatART(model=policy, base_url=art_server.base_url, max_tokens=48)
    rollout = make_rollout(model, mails)

    async def timed(scenario: Any) -> Any:
        run = await rollout(scenario)
        ended[run.id] = time.time()
        run.reward = (run.reward or 0.0) + len(ended) / 1000  # no group is of equal rewards
        return run

    trainer = Trainer(
        model,
        group_size=RUNS,
        groups_per_step=GROUPS,
        dynamic_sampling_rounds=0,
        out_dir=tmp_path / "fit",
    )
    fit = trainer.fit(timed, mails.scenarios("train"), steps=STEPS)
    trained = threading.Thread(target=lambda: asyncio.run(fit))

    page = watched.go("runs")
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    # A short step may be over before the page has looked: then its runs are in the other table.
    page.evaluate(WATCH, ["Running", "Runs"])
    curves = Watched(page.context.new_page(), watched.root)
    overview = curves.go("overview")
    expect(overview.get_by_role("heading", name="Overview", exact=True)).to_be_visible()
    page.bring_to_front()
    trained.start()
    # Nothing is reloaded. A step may be shorter than the time between two looks of the server.
    for step in (f"[1-{STEPS - 1}]", str(STEPS)):
        name = re.compile(rf"^Tokens trained.*{policy}.* at step {step}")
        expect(overview.get_by_role("img", name=name)).to_be_visible(timeout=120_000)
    trained.join(120)
    assert len(ended) == STEPS * GROUPS * RUNS
    assert all(seen(page, run) for run in ended)
    page.get_by_label("Policy").fill(policy)
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("tbody tr")).to_have_count(len(ended))
    expect(page.locator("tbody .badge", has_text="completed").first).to_be_visible()
    curves.page.close()
    assert not curves.wrong, curves.wrong


def test_a_run_is_listed_and_read_while_it_runs(watched: Watched, art_server: LiveServer) -> None:
    run = f"open-{uuid.uuid4().hex}"
    page = watched.go("runs")
    with art_server.http() as http:

        def call(words: str) -> None:
            asked = {
                "model": art_server.policy,
                "messages": [{"role": "user", "content": words}],
                "max_tokens": 3,
                "art": {"trajectory_id": run, "node": "writer"},
            }
            http.post("/v1/chat/completions", json=asked).raise_for_status()

        call("one")
        running = page.get_by_role("region", name="Running").get_by_role("row", name=run)
        expect(running).to_contain_text("writer")
        running.get_by_role("link").click()
        expect(page.locator(".call")).to_have_count(1)
        call("two")
        expect(page.locator(".call")).to_have_count(2)
        expect(page.get_by_text("These are its calls so far.")).to_be_visible()
        http.put(f"/v1/trajectories/{run}/reward", json={"reward": 1.0}).raise_for_status()
        expect(page.get_by_role("form", name="Give a review")).to_be_visible()
        watched.go("runs")
        expect(page.get_by_role("region", name="Runs").get_by_text(run)).to_be_visible()
        expect(page.get_by_role("region", name="Running").get_by_text(run)).to_have_count(0)
