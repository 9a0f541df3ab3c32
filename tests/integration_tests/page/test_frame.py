"""The page's frame in a real browser, on the real server."""

from playwright.sync_api import expect

from tests.support.browser import Watched


def test_the_server_serves_its_page(watched: Watched) -> None:
    page = watched.go("overview")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.get_by_text("base_model").first).to_be_visible()


def test_what_a_view_asks_first_is_asked_once_and_with_the_session(watched: Watched) -> None:
    """It does not wait for the view's modules, and the view does not ask a second time."""
    asked: list[str] = []
    watched.page.on("request", lambda sent: asked.append(sent.url.removeprefix(watched.root)))
    page = watched.go("overview")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    assert asked.count("/page/overview") == 1
    assert asked.index("/page/overview") < asked.index("/page/static/views/overview.js")
