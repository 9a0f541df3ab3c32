"""The lock: a key for a session, and what a session may not do without its token."""

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import Watched
from tests.support.live_server import LiveServer
from tests.support.stub_engines import StubServer

KEY = "PqT7cX0vM5hYw2Jd9sKf3LbR8nGz1Ua6EoWiC4tVyQx"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    data = tmp_path_factory.mktemp("locked") / "data"
    with StubServer(data, env={"ART_API_KEY": KEY}) as server:
        yield server


def test_a_person_logs_in_and_out(locked: LiveServer, browser: Browser) -> None:
    context = browser.new_context()
    watched = Watched(context.new_page(), locked.root)
    page = watched.go("overview")
    box = page.get_by_label("API key of this server")
    box.fill("not the key")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("The API key is wrong")
    box.fill(KEY)
    box.press("Enter")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    (cookie,) = context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    assert KEY not in str(cookie)
    page.reload()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()

    session = {"Cookie": f"{cookie['name']}={cookie['value']}"}
    with httpx.Client(base_url=locked.root, headers=session) as http:
        token = {"X-ART-Token": http.get("/page/session").json()["token"]}
        pin = f"/v1/policies/{locked.policy}/checkpoints/0/pin"
        assert http.get("/status").status_code == 200
        assert http.put(pin).status_code == 401
        assert http.put(pin, headers={"X-ART-Token": "0" * 64}).status_code == 401
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{locked.port + 1}"):
            foreign = token | {"Origin": origin}
            assert http.put(pin, headers=foreign).status_code == 401
            assert http.get("/status", headers=foreign).status_code == 401
        own = token | {"Origin": locked.root}
        assert http.put(pin, headers=own | {"Host": "evil.example"}).status_code == 401
        assert http.put(pin, headers=own).status_code == 200
        assert http.delete(pin, headers=own).status_code == 200
    forged = cookie["value"][:-1] + ("0" if cookie["value"][-1] != "0" else "1")
    for value in (forged, "", "9999999999.x." + "0" * 64, "..", "é"):
        sent = {"Cookie": f"{cookie['name']}={value}".encode()}
        assert httpx.get(f"{locked.root}/status", headers=sent).status_code == 401

    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("API key of this server")).to_be_visible()
    assert not context.cookies()
    assert httpx.get(f"{locked.root}/status", headers=session).status_code == 401  # a kept cookie
    context.close()
    assert not watched.wrong, watched.wrong


def test_without_a_session_there_is_the_page_and_nothing_else(locked: LiveServer) -> None:
    with httpx.Client(base_url=locked.root) as http:
        page = http.get("/")
        assert page.status_code == 200
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert http.get("/page/static/main.js").status_code == 200
        assert http.get("/page/static/../login.py").status_code in (401, 404)
        assert http.get("/page/static/%2e%2e/login.py").status_code in (401, 404)
        for path in ("/page/overview", "/page/events", "/status", "/v1/models", "/openapi.json"):
            assert http.get(path).status_code == 401, path
        foreign = {"Origin": "http://evil.example"}
        sent = http.post("/page/login", json={"key": KEY}, headers=foreign)
        assert sent.status_code == 401 and "set-cookie" not in sent.headers


def test_watchers_do_not_hold_up_the_end_of_a_server(locked: LiveServer) -> None:
    """The last test of this server: a stream ends whole with it, and is not cut off."""
    with locked.http() as http, http.stream("GET", "/page/events") as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("retry")
        assert locked.process is not None
        locked.process.terminate()
        for _ in lines:  # raises what a connection that was cut off raises
            pass
        locked.process.wait(timeout=60)
