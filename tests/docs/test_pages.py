"""What the pages say of the repository is so: files, links, public names, messages, the version."""

import ast
import importlib
import re
import subprocess
from pathlib import Path

import pytest

from langchain_art import __version__
from tests.support.pages import PAGES, REPO

PACKAGES = [REPO / "langchain_art", REPO / "server" / "langchain_art_server"]
TROUBLES = (REPO / "docs" / "troubleshooting.md").read_text()


def test_files_that_a_page_names_and_links_to_exist() -> None:
    """Anchors, and links in docs/, are checked by `make docs` as well."""
    generated = {"index.md", "contributing.md", "changelog.md", "http-api.md", "command-line.md"}
    made = {REPO / "docs" / name for name in generated}
    rooms = "benchmarks|docs|examples|langchain_art|requirements|server|tests"
    gone: set[str] = set()
    for page in PAGES:
        text = page.read_text()
        named = re.findall(rf"`((?:{rooms})/[\w./-]+)`", text)
        gone |= {f"{page}: {path}" for path in named if not (REPO / path).exists()}
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            path = (page.parent / target).resolve()
            gone |= set() if path.exists() or path in made else {f"{page}: {target}"}
    assert not gone


@pytest.mark.parametrize("package", ["langchain_art", "langchain_art.evaluators"])
def test_public_names_are_documented(package: str) -> None:
    module = importlib.import_module(package)
    reference = "".join(page.read_text() for page in (REPO / "docs" / "reference").glob("*.md"))
    for name in module.__all__:
        value = getattr(module, name)
        shown = rf"^::: langchain_art(\.evaluators)?\.{name}$"
        assert re.search(shown, reference, re.MULTILINE), f"{name} is not in docs/reference"
        if callable(value):
            assert (value.__doc__ or "").strip(), f"{name} has no docstring"


def said_by_the_code() -> str:
    """All texts of both packages; where a value goes in, there is an ellipsis."""
    texts: list[str] = []
    for root in PACKAGES:
        for path in root.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", "…") for part in node.values]
                    texts.append("".join(p if isinstance(p, str) else "…" for p in parts))
    return "\n".join(texts)


def test_messages_and_reasons_that_troubleshooting_explains_exist() -> None:
    said = said_by_the_code()
    messages = re.findall(r"^`([^`]+)`.*\n:   ", TROUBLES, re.MULTILINE)
    assert len(messages) > 20
    parts = {part.strip(" `") for one in messages for part in re.split("…", one)}
    unknown = {part for part in parts if len(part) > 3 and part not in said}
    assert not unknown
    reasons = re.findall(
        r"`(groups|runs|calls)\.(\w+)`", TROUBLES.partition("What was excluded")[2]
    )
    assert len(reasons) > 15
    unknown = {f"{unit}.{word}" for unit, word in reasons if word.rstrip("_") not in said}
    assert not unknown


def test_the_version_stands_once() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True
    )
    suffixes = {".py", ".md", ".toml", ".yml", ".cfg", ".json"}
    pattern = re.compile(rf"(?<![\d.]){re.escape(__version__)}(?![\d.])")
    places = [
        name
        for name in listed.stdout.splitlines()
        if Path(name).suffix in suffixes
        and (REPO / name).exists()
        and pattern.search((REPO / name).read_text())
    ]
    places.remove("requirements/langchain-art.cdx.json")  # written from it, which `test_sbom` holds
    assert places == ["langchain_art/_version.py"]
