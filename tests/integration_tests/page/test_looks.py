"""Every view: no serious finding of axe-core, light and dark; nothing wider than the window."""

from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser import Watched
from tests.support.environments import node_modules
from tests.support.live_server import REPO, LiveServer
from tests.support.soak import in_soak_alone
from tests.support.steps_of_a_fit import evaluate, step

#: Places of the page, and what is visible there when they are loaded.
VIEWS = {
    "overview": "Curves by step",
    "runs": "Runs",
    "review": "To review",
    "versions/tiny": "tiny",
    "jobs?policy=tiny": "Jobs of tiny",
}


@pytest.fixture(scope="module")
def axe() -> str:
    home = node_modules(REPO / "package.json")
    return (home / "node_modules/axe-core/axe.min.js").read_text()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("width", "scheme"),
    [(390, "dark"), in_soak_alone(1280, "light"), in_soak_alone(2560, "dark")],
)
def test_no_view_has_a_serious_finding(
    browser: Browser, art_server: LiveServer, axe: str, width: int, scheme: Any, http: httpx.Client
) -> None:
    made = step(http, art_server.policy, f"looks-{width}", 1)["result"]["version"]
    before, after = f"{art_server.policy}@0", f"{art_server.policy}@{made}"
    long = f"a-policy-of-a-long-name-{width}-{scheme}" + "-and-more" * 3
    http.post("/v1/policies", json={"name": long}).raise_for_status()
    for version in (before, after, f"{long}@0"):
        evaluate(http, version, {"looks-a": 0.0, "looks-b": 1.0})
    newest = http.get("/page/runs?limit=1").json()["runs"][0]["id"]
    one_run = {f"runs/{newest}/siblings": "Siblings of", f"runs/{newest}?call=0": newest}
    both = f"before={before}&after={after}"
    compared = {
        f"versions/tiny?{both}": "By scenario",
        f"review/blind?{both}": "Compared blind",
        f"review/blind?{both}&reviewer=Ann": "Left",
    }
    # axe is evaluated by the test, past the policy that would refuse it as a script of the page.
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
    )
    watched = Watched(context.new_page(), art_server.root)
    page = watched.page
    for place, seen in (VIEWS | compared | one_run).items():
        watched.go(place)
        # A list of open runs, "Running", stands above the table while another test calls.
        expect(page.get_by_role("heading", name=seen, exact=seen == "Runs")).to_be_visible()
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{place} is {wide} pixels wider than {width}"
        page.evaluate(axe)
        without_serious_finding(page, place)
    page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    without_serious_finding(page, f"{place} in the other colours")
    context.close()
    assert not watched.wrong, watched.wrong


def without_serious_finding(page: Page, place: str) -> None:
    found = page.evaluate("axe.run({resultTypes: ['violations']})")
    serious = [
        (one["id"], one["help"], one["nodes"][0]["html"][:200])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert not serious, (place, serious)
    assert len(found["passes"]) > 10


def test_all_of_it_is_reached_by_keyboard(watched: Watched) -> None:
    page = watched.go("overview")
    expect(page.get_by_role("heading", name="Overview", exact=True)).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")
