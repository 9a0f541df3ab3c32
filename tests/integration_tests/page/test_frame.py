"""The page's frame in a real browser, on the real server."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.support.browser import Watched


def test_the_server_serves_its_page(watched: Watched) -> None:
    page = watched.go("overview")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.get_by_text("base_model").first).to_be_visible()
