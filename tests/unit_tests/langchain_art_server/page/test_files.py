import gzip
import hashlib
import json
import re
import zlib

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount

from langchain_art_server.page.routes import FILES, PLACE, PageFiles


@pytest.fixture
async def http() -> httpx.AsyncClient:
    app = Starlette(routes=[Mount(PLACE, GZipMiddleware(PageFiles(), minimum_size=1))])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://page")


@pytest.mark.parametrize("name", ["main.js", "page.css", "views/overview.js", "icon.svg"])
async def test_a_file_is_what_is_written_and_is_sent_once(
    http: httpx.AsyncClient, name: str
) -> None:
    written = (FILES / name).read_bytes()
    plain = await http.get(f"{PLACE}/{name}", headers={"Accept-Encoding": "identity"})
    assert plain.status_code == 200 and plain.content == written
    assert "content-encoding" not in plain.headers
    async with http.stream("GET", f"{PLACE}/{name}") as packed:
        sent = b"".join([part async for part in packed.aiter_raw()])
    assert packed.headers["content-encoding"] == "gzip" and gzip.decompress(sent) == written
    for answer in (plain, packed):
        assert "script-src 'self'" in answer.headers["content-security-policy"]
    again = await http.get(f"{PLACE}/{name}", headers={"If-None-Match": plain.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert (await http.post(f"{PLACE}/{name}")).status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        *("nothing.js", "views", "../files.py", "%2e%2e/files.py", "/etc/passwd", "main.js/x"),
        *("x" * 300, "x/" * 4096, "main.js%00", "%ed%a0%80"),
    ],
)
async def test_what_is_no_file_of_the_page_is_not_there(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(f"{PLACE}/{path}")).status_code == 404


VENDOR = FILES / "vendor"


def test_vendored_files_are_those_of_the_manifest() -> None:
    listed = {one["file"]: one for one in json.loads((VENDOR / "manifest.json").read_text())}
    there = {path.name for path in VENDOR.iterdir() if not path.name.endswith(".d.ts")}
    assert there == {"manifest.json", *listed}
    for name, one in listed.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == one["sha256"], name
        assert one["version"] and one["licence"]


def test_no_script_turns_text_into_markup_or_asks_another_host() -> None:
    ours = [path for path in FILES.rglob("*") if path.is_file() and VENDOR not in path.parents]
    assert any(path.name == "main.js" for path in ours)
    sink = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySet|\beval\(|"
        r"new Function|https?://(?!www\.w3\.org/2000/svg)|\bon\w+=\"|<style|style=\""
    )
    for path in ours:
        found = sink.search(re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL))
        assert found is None, f"{path.name}: {found}"


def test_the_page_adds_little_to_the_wheel() -> None:
    size = sum(len(zlib.compress(p.read_bytes())) for p in FILES.rglob("*") if p.is_file())
    assert size < 400_000
