"""The figures of docs/sizing.md and docs/cpu.md: the doctor's, and quotients of published ones."""

import re

import pytest

from langchain_art import gpu_memory
from langchain_art.diagnostics import doctor
from tests.docs.test_figures import DOCS, section

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
