"""Figures that pages quote are those of the sections that they link to.

`docs/benchmarks.md`, the H200's section of `docs/gpu.md` and the examples' pages hold the published
figures.
"""

import json
import re
from decimal import Decimal

from tests.support.pages import PAGES, REPO

DOCS = REPO / "docs"
H200 = REPO / "benchmarks" / "gpu" / "figures" / "h200-2026-11-26" / "learner-qwen3-8b.json"
#: A number with decimals, or one that counts percents, seconds or times.
FIGURE = re.compile(
    r"(?<![\w.])\d[\d,]*(?:\.\d+(?:e-?\d+)?(?![\w.]|-\d)|(?=(?: %| s\b| seconds| times)))"
)
LINK = re.compile(r"\]\((?:docs/|\.\./)?((?:benchmarks|gpu|examples/[\w-]+)\.md)#([\w-]+)\)")
#: Of `docs/gpu.md`, the section that holds figures.
MEASURED = {("gpu.md", "on-one-h200")}


def section(page: str, anchor: str) -> str:
    """The text below the heading that an anchor names, up to the next one of its level."""
    parts = re.split(r"^(#+ .*)$", (DOCS / page).read_text(), flags=re.MULTILINE)
    found, level = [], 0
    for head, body in zip(parts[1::2], parts[2::2], strict=True):
        depth = len(head) - len(head.lstrip("#"))
        named = re.search(r"\{ #([\w-]+) \}", head)
        name = named[1] if named else re.sub(r"\W+", "-", head.strip("# ").lower())
        if level and depth <= level:
            break
        if name == anchor:
            level = depth
        if level:
            found.append(body)
    assert found, f"docs/{page} has no section #{anchor}"
    return "".join(found)


def figures(text: str) -> list[Decimal]:
    return [Decimal(one.replace(",", "")) for one in FIGURE.findall(text)]


def sentences(text: str) -> list[str]:
    """Sentences and cells of tables, without blocks of code."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n(?=[>\s]*(?:\||[-*] |\d+\. ))", prose)
    return [
        one for block in blocks for one in re.split(r"(?<=[.!?;]) | \| ", " ".join(block.split()))
    ]


def unsupported(sentence: str) -> list[Decimal]:
    """Figures of a sentence that no section that it links to has, exactly or rounded."""
    linked = [
        found
        for found in LINK.findall(sentence)
        if found[0] == "benchmarks.md" or found in MEASURED
    ]
    if not linked:
        return []
    published = [
        Decimal(one.replace(",", ""))
        for found in linked
        for one in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", section(*found))
    ]
    return [
        one
        for one in figures(re.sub(r"\]\([^)]*\)", "", sentence))
        if not any(one == round(full, max(0, -int(one.as_tuple().exponent))) for full in published)
    ]


def test_quoted_figures_are_the_published_ones() -> None:
    quoted = [(page, one) for page in PAGES for one in sentences(page.read_text())]
    assert not [(page, one, wrong) for page, one in quoted if (wrong := unsupported(one))]


def test_the_gpu_page_has_the_stored_measurement() -> None:
    page = section("gpu.md", "on-one-h200")
    for name, one in json.loads(H200.read_text())["workloads"].items():
        forest, rows = one["methods"]["forest"], one["methods"]["packed rows"]
        row = (
            f"| {one['run_tokens']:,} | {one['distinct_tokens']:,} | {forest['seconds']:.2f} s "
            f"| {rows['seconds']:.2f} s | **{one['rows_over_forest']:.2f}** "
            f"| {forest['run_tokens_per_second']:,.0f} "
            f"| {100 * forest['mfu']:.1f} %, {100 * rows['mfu']:.1f} % "
            f"| {forest['peak_bytes'] / 1e9:.1f} GB |"
        )
        assert row in page, name
