"""One browser for the tests of the page."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import Watched, running_browser
from tests.support.live_server import LiveServer


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=60_000)  # of a busy machine; it is five seconds
    with running_browser() as browser:
        yield browser


@pytest.fixture
def watched(browser: Browser, art_server: LiveServer) -> Iterator[Watched]:
    """A page of the shared server; the test fails if a script, a dialog or a request got out."""
    context = browser.new_context()
    context.set_default_timeout(60_000)
    watched = Watched(context.new_page(), art_server.root)
    yield watched
    context.close()
    assert not watched.wrong, watched.wrong
