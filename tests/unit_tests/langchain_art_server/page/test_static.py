import hashlib
import json
import re
import zlib

from langchain_art_server.page.routes import FILES

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
