"""The notebooks run, on a small model; what is stored of them is shown, of no machine.

``make soak`` makes all of each fit, and runs each in a kernel with a server of its own; in ``make
test`` `training/test_notebook.py` has a kernel.
"""

import ast
import asyncio
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from docs.notebook_pages import notebook
from langchain_art import LocalServer
from langchain_art.wire.policies import FLOAT16_PRECISION
from tests.support import forked_start
from tests.support.langfuse_server import LangfuseServer
from tests.support.live_server import small_model
from tests.support.pages import REPO
from tests.support.soak import count, share

BOOKS = sorted((REPO / "docs" / "notebooks").glob("*.ipynb"))
#: Stored without outputs, since no such card was at hand.
NOT_RUN = "free_gpu"
#: Ways of a machine, which no output shows.
_PLACES = re.compile(r"/(?:work|tmp|root|home|usr|opt|var)/|ipykernel_\d|127\.0\.0\.1")
#: Sizes of each fit in ``make test`` but that of `NOT_RUN`: its second step has a new version.
FEWER = {"steps": 1, "group_size": 4}
NUMBERS = re.compile(r"\b(steps|group_size)=(\d+)")


def name(book: Path) -> str:
    return book.stem


def code_cells(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def run_in_a_kernel(book: Any, env: dict[str, str], folder: Path) -> None:
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(book, timeout=600, kernel_name="python3", resources=resources)
    client.execute(env=os.environ | env)  # raises what a cell raises
    ran = [cell for cell in code_cells(book) if cell.source.startswith("fit.plot")]
    assert all(cell.outputs[0].data["image/png"] for cell in ran)


async def run_here(book: Any) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(book)[1:], 1):
        code = compile(
            cell.source, f"cell {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
        )
        if inspect.isawaitable(made := eval(code, names)):
            await made


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("path", BOOKS, ids=name)
def test_every_cell_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = nbformat.read(path, as_version=4)
    for cell in code_cells(book) if path.stem != NOT_RUN else ():
        cell.source = NUMBERS.sub(
            lambda said: f"{said[1]}={count(FEWER[said[1]], int(said[2]))}", cell.source
        )
    with LangfuseServer() as langfuse:
        env = {"NOTEBOOK_MODEL": str(small_model())} | langfuse.environment
        if share():
            run_in_a_kernel(book, env, tmp_path)
        else:
            monkeypatch.setattr(LocalServer, "_spawn", forked_start.spawn)
            monkeypatch.chdir(tmp_path)
            for key, value in env.items():
                monkeypatch.setenv(key, value)
            asyncio.run(run_here(book))
    [history] = tmp_path.rglob("history.jsonl")
    steps = [
        one for one in map(json.loads, history.read_text().splitlines()) if one["kind"] == "step"
    ]
    assert steps
    if path.stem == NOT_RUN:
        told = [result["metrics"] for one in steps for result in one["results"].values()]
        gap = max(one["logprob_gap_mean"] for one in told)
        assert gap <= FLOAT16_PRECISION and (not share() or "'float16'" in str(book.cells))
        assert len(told) == 2 and all(
            one["loss_scale"] >= 1 for one in told
        )  # float16 alone has it
    assert path.stem != "langfuse" or len(langfuse.traces()) > 20


@pytest.mark.parametrize("path", BOOKS, ids=name)
def test_what_is_stored_is_whole_and_of_no_machine_and_a_page_shows_it(path: Path) -> None:
    assert {name(book) for book in BOOKS} >= {"first_fit", "your_own_agent", "langfuse", NOT_RUN}
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    page = notebook(path, None)
    assert page.startswith("# ") and "colab.research" not in page
    assert all(cell.source in page for cell in book.cells[1:])
    assert page.count("<div ") >= sum(bool(cell.outputs) for cell in code_cells(book))
    link = f"colab.research.google.com/github/ann/art/blob/main/docs/notebooks/{path.name})"
    assert link in notebook(path, "ann/art")
    cells = code_cells(book)
    stored = [output for cell in cells for output in cell.outputs]
    if path.stem == NOT_RUN:
        assert not stored and "**Not run on a card yet.**" in book.cells[0].source
        return
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert "SmolLM2-135M-Instruct" in book.cells[0].source
    assert not [one for one in stored if one.output_type == "error"]
    told = json.dumps([{**one, "data": {**one.get("data", {}), "image/png": ""}} for one in stored])
    assert not _PLACES.search(told), _PLACES.search(told)
    assert "held out" in told or path.stem == "langfuse"
    assert any("image/png" in one.get("data", {}) for one in stored) or path.stem == "langfuse"
