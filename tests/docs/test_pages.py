"""What the pages say of the repository is so: files, links, public names, messages, the version."""

import ast
import importlib
import io
import re
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from langchain_art import __version__
from langchain_art.training.progress import Display
from langchain_art.training.records import EvalResult, StepRecord
from langchain_art.wire import NodeReport, TrainResult
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


def test_a_word_of_the_field_leads_to_its_module() -> None:
    """By the name of the file, or by the docstring at its top."""
    page = (REPO / "docs" / "architecture.md").read_text()
    table = page.partition("## Where to find what")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\w -]+) \| `([\w/]+\.py)`", table, re.MULTILINE)
    assert len(rows) >= 18
    for word, name in rows:
        docstring = ast.get_docstring(ast.parse((REPO / name).read_text())) or ""
        found = f"{Path(name).stem.replace('_', ' ')} {' '.join(docstring.split())}".lower()
        assert word.lower() in found, f"{name} does not name {word}"


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


PAGE = REPO / "docs" / "first-run.md"


def printed() -> str:
    node = NodeReport(calls=9, tokens=812, advantage_mean=0.0, advantage_abs=0.43, excluded={})
    metrics = {"loss": -0.001, "grad_norm": 0.3, "logprob_gap_mean": 1e-6}
    result = TrainResult(
        policy="my-agent",
        version=3,
        metrics=metrics,
        excluded={"groups.zero_variance": 9},
        nodes={"writer": node},
    )
    record = StepRecord(
        step=3,
        results={"my-agent": result},
        reward_mean=0.412,
        reward_std=0.492,
        groups=16,
        failed=2,
        retried=3,
        seconds={"rollout": 2.1, "train": 0.9, "total": 3.0},
    )
    held_out = EvalResult(step=10, versions=("my-agent@10",), mean=0.625, ci95=0.067, n=200)
    console = Console(file=io.StringIO(), width=200)
    display = Display(console)
    display.step(record, 30, first=False)
    display.eval(held_out)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_what_the_display_says_is_what_the_page_explains() -> None:
    table = PAGE.read_text().partition("{ #display }")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(shown) > 8
    said = printed()
    for words in shown:
        plain = " ".join(words.replace("\\|", "|").split())
        assert "…" in plain or plain in said, plain
