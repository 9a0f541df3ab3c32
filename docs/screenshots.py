"""The screenshots of the page in this documentation, made anew: ``python -m docs.screenshots``.

Two short fits on the real server with the examples' base model, seen in the real browser.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from tests.support.browser import Watched, running_browser
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import evaluate, step

COMPARED = "versions/tiny?before=tiny%400&after=tiny%408&rate=2.5"
IMAGES = Path(__file__).parent / "images"
#: Name, place of the page, what is visible when it is loaded, width, colour scheme.
SHOTS: list[tuple[str, str, str, int, Any]] = [
    ("page-overview", "overview", "Curves by step", 1280, "light"),
    ("page-overview-narrow", "overview", "Curves by step", 390, "dark"),
    ("page-jobs", "jobs", "Jobs of tiny", 1280, "dark"),
    ("page-versions", "versions", "tiny", 1280, "light"),
    ("page-comparison", COMPARED, "By scenario", 1280, "dark"),
]


def main() -> None:
    """Start a server, train a little, and take the pictures."""
    folder = Path(tempfile.mkdtemp(prefix="art-screenshots-"))
    server = LiveServer(folder / "data").start()
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
            for name, place, seen, width, scheme in SHOTS:
                size: Any = {"width": width, "height": 900}
                context = browser.new_context(viewport=size, color_scheme=scheme)
                page = Watched(context.new_page(), server.root).go(place)
                expect(page.get_by_role("heading", name=seen)).to_be_visible()
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
