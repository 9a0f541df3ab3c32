"""Figures that pages quote are those of the sections that they link to, or computed here again.

`docs/benchmarks.md`, the H200's section of `docs/gpu.md` and the examples' pages hold the published
figures.
"""

import json
import random
import re
import statistics
from decimal import Decimal

import pytest

from examples.frozen_lake.environment import Walk, lakes
from langchain_art import gpu_memory
from langchain_art.diagnostics import doctor
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


def test_a_quote_is_its_figure_or_the_figure_rounded() -> None:
    for sentence, wrong in (
        ("The [race](benchmarks.md#race): 1.52 times.", []),
        ("The [race](benchmarks.md#race): 1.5 times.", []),
        ("The [race](benchmarks.md#race): 1.6 times.", [Decimal("1.6")]),
        ("The [race](docs/benchmarks.md#race): 5.1 times.", [Decimal("5.1")]),
        ("1.1 to 6.5 times ([one](gpu.md#on-one-h200)).", []),
        ("1.1 to 6.9 times ([one](gpu.md#on-one-h200)).", [Decimal("6.9")]),
        ("A page that measures itself: 9.9 times.", []),
    ):
        assert unsupported(sentence) == wrong


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


SIZING = (DOCS / "sizing.md").read_text()
CPU = (DOCS / "cpu.md").read_text()
ENOUGH = 1 << 50
CARDS = [(1, 24), (1, 48), (1, 80), (1, 150), (2, 80)]


def on_a_cpu(name: str) -> str:
    fit = doctor.fit(name, doctor.KNOWN[name], 0, ENOUGH, ENOUGH, context=2048, rank=16)
    needed = fit.sampler_bytes + fit.learner_bytes + 2 * gpu_memory.PROCESS_BYTES
    return f"{needed / 1e9:.1f}"


def placed(name: str, cards: int, gigabytes: int) -> str:
    size = gigabytes * 10**9
    fit = doctor.fit(name, doctor.KNOWN[name], cards, size, size, context=8192, rank=16)
    return f"{'4 bits, ' if fit.quantization else ''}{fit.placement or 'no'}"


@pytest.mark.parametrize("name", doctor.KNOWN)
def test_the_memory_of_a_base_is_what_the_doctor_computes(name: str) -> None:
    shape = doctor.KNOWN[name]
    fit = doctor.fit(name, shape, 1, ENOUGH, ENOUGH, context=8192, rank=16)
    both = f"{fit.sampler_bytes / 1e9:.1f}, {fit.learner_bytes / 1e9:.1f}"
    cells = [name, f"{shape.parameters / 1e9:.2f}", on_a_cpu(name), both]
    row = " | ".join([*cells, *(placed(name, *card) for card in CARDS)])
    assert f"\n| {row} | *estimated* |\n" in SIZING


def test_the_page_of_a_cpu_quotes_the_doctor() -> None:
    assert f"{on_a_cpu('SmolLM2-135M')} GB" in CPU


def test_times_of_a_step_follow_from_what_the_examples_measured() -> None:
    rows = re.findall(
        r"^\| \[[^]]*\]\((examples/[\w-]+\.md)#(what-was-measured)\) \|[^|]*\| (\d+) \| "
        r"([\d,]+) s \| (.*) \|$",
        CPU,
        re.MULTILINE,
    )
    assert len(rows) == 4
    steps_of = []
    for page, anchor, steps, seconds, computed in rows:
        assert re.search(rf"(?<![\d,]){seconds}(?![\d,])", section(page, anchor)), page
        step = int(seconds.replace(",", "")) / int(steps)
        assert computed == f"{step:.1f} s | {step * 100 / 60:.0f} min"
        steps_of.append(step)
    least, most = min(steps_of), max(steps_of)
    times = f"{least:.1f} to {most:.1f} s | {least * 100 / 60:.0f} to {most * 100 / 60:.0f} min"
    assert times in SIZING


WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def moves(walk: Walk, player: str) -> list[str]:
    if player.startswith("any move that"):
        return list(walk.moves)
    signs = walk.board.replace(" ", "").replace("\n", "")
    at, goal = divmod(signs.index("P"), 4), divmod(signs.index("G"), 4)
    nearer: dict[str, str] = {}
    for move in walk.moves:
        row, column = (here + by for here, by in zip(at, WAYS[move], strict=True))
        if abs(row - goal[0]) + abs(column - goal[1]) < abs(at[0] - goal[0]) + abs(at[1] - goal[1]):
            nearer[move] = signs[4 * row + column]
    safe = [move for move, sign in nearer.items() if sign != "H"]
    return safe if safe and player.startswith("the same") else list(nearer)


LAKES = (REPO / "docs/examples/frozen-lake.md").read_text()
ROWS = LAKES.partition("| player |")[2].partition("\n\n")[0].splitlines()[2:]


def test_what_players_without_a_model_get() -> None:
    assert len(ROWS) == 3
    for line in ROWS:
        player, mean, reached = (cell.strip() for cell in line.strip("|").split("|"))
        rewards: list[float] = []
        for number, lake in enumerate(lakes("test", 300)):
            walk, drawn = Walk(lake.seed), random.Random(number)
            while not walk.over:
                walk.go(drawn.choice(moves(walk, player)))
            rewards.append(walk.reward)
        assert f"{statistics.fmean(rewards):.2f}" == mean, player
        assert f"{statistics.fmean(reward == 1 for reward in rewards):.2f}" == reached, player
