"""The screenshots of the page in this documentation, made anew: ``python -m docs.screenshots``.

Two short fits on the real server with the examples' base model, seen in the real browser.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from langchain_art.client.sync_client import ArtClient
from langchain_art.wire import Trajectory, TrajectoryGroup
from tests.support.browser import Watched, running_browser
from tests.support.drawn_runs import drawn_run
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import evaluate, step

COMPARED = "versions/tiny?before=tiny%400&after=tiny%408"
IMAGES = Path(__file__).parent / "images"
#: Name, place of the page, what is visible when it is loaded, width, colour scheme.
SHOTS: list[tuple[str, str, str, int, Any]] = [
    ("page-overview", "overview", "Curves by step", 1280, "light"),
    ("page-overview-narrow", "overview", "Curves by step", 390, "dark"),
    ("page-jobs", "jobs", "Jobs of tiny", 1280, "dark"),
    ("page-versions", "versions", "tiny", 1280, "light"),
    (
        "page-blind",
        "review/blind?before=tiny%400&after=tiny%408&reviewer=Ann",
        "Left",
        1280,
        "light",
    ),
    ("page-comparison", COMPARED, "By scenario", 1280, "dark"),
]


def shots_of_runs(server: LiveServer) -> list[tuple[str, str, str, int, Any]]:
    """Store a group of captured runs, train on it; the pictures of one and of all of them."""
    with ArtClient(server.base_url) as client:
        runs: list[Trajectory] = []
        for at, reward in enumerate((1.0, 0.0, 0.25)):
            run = drawn_run(server, tokens=24, scenario="When did Ann write?")
            said = {"rubric": ("Names the day.", "Says no day.", "Vague.")[at]}
            scores = {"rubric": reward, "brevity": (0.2, 0.9, 0.5)[at]}
            more = {"reward": reward, "scores": scores, "metadata": {"judged": said}}
            runs.append(run.model_copy(update=more))
        client.post_groups([TrajectoryGroup(id="ann", trajectories=tuple(runs))])
        client.wait(client.train([[run.id for run in runs]], server.policy))
    first = runs[0]
    return [
        ("page-run", f"runs/{first.id}", first.id, 1280, "light"),
        ("page-run-narrow", f"runs/{first.id}", first.id, 390, "dark"),
        ("page-tokens", f"runs/{first.id}?call=2", first.id, 1280, "light"),
        ("page-runs", "runs", "Runs", 1280, "light"),
        ("page-siblings", f"runs/{first.id}/siblings", f"Siblings of {first.id}", 1280, "dark"),
        ("page-review", "review", "To review", 1280, "light"),
    ]


def main() -> None:
    """Start a server, train a little, and take the pictures."""
    folder = Path(tempfile.mkdtemp(prefix="art-screenshots-"))
    (folder / "server.toml").write_text("[page]\ngpu_rate = 2.5\n")
    server = LiveServer(folder / "data", "--config", str(folder / "server.toml")).start()
    try:
        with server.http() as http:
            version, held_out = 0, [f"question {i}" for i in range(1, 10)]
            for fit, steps in (("spring", 5), ("autumn", 3)):
                for number in range(steps + 1):
                    if number:
                        rewards = tuple(float(i < number) for i in range(6))
                        took: Any = {"rollout": 4.0 + number % 2, "judge": 1.5}
                        step(http, server.policy, fit, number, rewards, "answer", seconds=took)
                        version += 1
                    if number in (0, steps):
                        right = {
                            one: float((7 * i) % 9 in range(version // 4, version + 1))
                            for i, one in enumerate(held_out)
                        }
                        evaluate(http, f"{server.policy}@{version}", right, "answer")
        with running_browser() as browser:
            for name, place, seen, width, scheme in [*SHOTS, *shots_of_runs(server)]:
                size: Any = {"width": width, "height": 900}
                context = browser.new_context(viewport=size, color_scheme=scheme)
                page = Watched(context.new_page(), server.root).go(place)
                expect(page.get_by_role("heading", name=seen)).to_be_visible()
                if "?call=" in place:
                    page.locator(".token").nth(2).click()
                page.wait_for_timeout(500)  # curves are drawn in the next frame
                if place == COMPARED:
                    heading = page.get_by_role("heading", name="Compare two versions")
                    heading.evaluate(
                        "it => scrollTo(0, it.getBoundingClientRect().top + scrollY - 64)"
                    )
                page.screenshot(path=IMAGES / f"{name}.png")
                context.close()
    finally:
        server.stop()


if __name__ == "__main__":
    main()
