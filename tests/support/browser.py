"""Debian's chromium, driven by Playwright: the real browser that the page is tested in."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.environments import HOMES


def chromium() -> str:
    """Its program; installed by apt where that may be done, by one of the tests' processes."""
    HOMES.mkdir(exist_ok=True)
    with FileLock(HOMES / "chromium.lock"):
        if shutil.which("chromium") is None and os.geteuid() == 0 and shutil.which("apt-get"):
            env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            for argv in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
                done = subprocess.run(
                    ["apt-get", *argv], env=env, capture_output=True, text=True, timeout=600
                )
                assert done.returncode == 0, done.stderr[-3000:]
    found = shutil.which("chromium")
    assert found is not None, "the page's tests need chromium: apt-get install chromium"
    return found


@contextmanager
def running_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Root has no sandbox; what is shown comes from the tests' own server.
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page of the browser, and all that must not happen on one."""

    def __init__(self, page: Page, root: str) -> None:
        self.page, self.root = page, root
        self.wrong: list[str] = []
        page.on(
            "dialog",
            lambda dialog: (self.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()),
        )
        page.on("pageerror", lambda error: self.wrong.append(f"error {error}"))
        page.on("request", lambda sent: self._check(sent.url))
        page.on("console", lambda said: self._said(said.type, said.text, said.location["url"]))

    def go(self, place: str) -> Page:
        """Show `#/place` and wait until its view is there."""
        self.page.goto(f"{self.root}/#/{place}")
        return self.page

    def _check(self, url: str) -> None:
        if not url.startswith((self.root, "data:", "blob:")):
            self.wrong.append(f"request to {url}")

    def _said(self, kind: str, text: str, url: str) -> None:
        if kind == "error" and "401" not in text:
            self.wrong.append(f"console {text} {url}")
