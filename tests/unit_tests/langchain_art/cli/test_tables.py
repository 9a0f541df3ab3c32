import io

from rich.console import Console

from langchain_art.cli.tables import runs_table
from langchain_art.wire import Trajectory, Turn


def test_a_run_is_listed_with_its_total_return() -> None:
    console = Console(file=io.StringIO(), width=80)
    turns = (Turn(node="writer", reward=0.25), Turn(node="critic", reward=0.5))
    console.print(runs_table([Trajectory(id="t", scenario="q", turns=turns)]))
    assert "0.750" in console.file.getvalue()  # type: ignore[attr-defined]
