import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.text import Text

from langchain_art import Run, Trajectory, TrajectoryGroup, Turn, Usage
from langchain_art._notebook import Cell
from langchain_art.analytics import analyze
from langchain_art.statistics.intervals import compare_rewards
from langchain_art.training.fit_state import FitState
from langchain_art.training.fits import Fit
from langchain_art.training.records import FitResult
from langchain_art.wire import TrajectoryAudit
from tests.support.fits import evaluation, identity, record

NASTY = "<script>alert('it')</script>"
TURN = Turn(
    call_id="c-1",
    node="writer",
    model="p@3",
    messages=({"role": "user", "content": NASTY},),
    reply={"role": "assistant", "content": "[bold]so[/bold]"},
    usage=Usage(prompt_tokens=7, completion_tokens=2),
)
RUN = Trajectory(id="run-1", scenario="q <7>", turns=(TURN,), reward=0.5)
BY_CALL = Trajectory(id="run-2", turns=(Turn(reward=0.25), Turn(reward=0.5)))  # worth their sum
RESULT = FitResult(
    fit_id="f",
    versions={"p": 2},
    before=evaluation(0.25, 0),
    after=evaluation(0.75, 2),
    history=(record(1, 1), record(2, 2)),
    evals=(evaluation(0.25, 0), evaluation(0.75, 2)),
)


def captured() -> Run:
    run = Run(scenario=NASTY)
    run.reward = 0.125
    return run


def stored() -> Fit:
    fit = Fit(name="spring", state=FitState(identity=identity(), fit_id="f"), at=0, running=False)
    for one in (*RESULT.history, *RESULT.evals):
        fit.keep(one)
    return fit


AUDIT = TrajectoryAudit(
    trajectory="run-1", status="completed", reward=0.5, turns=(), rows=0, trained_by={}
)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RUN, ("run-1", "reward 0.500", "writer", "7 + 2 tokens", "[bold]so[/bold]")),
        (captured, ("reward 0.125",)),
        (lambda: TrajectoryGroup(id="g", trajectories=(RUN, BY_CALL)), ("run-1", "p@3", "0.750")),
        (lambda: AUDIT, ("run-1", "Not trained yet")),
        (lambda: RESULT, ("held out before", "0.250", "held out after", "ChatART")),
        (lambda: RESULT.before, ("held out after step 0: 0.250",)),
        (stored, ("spring: stopped", "held out before", "training reward")),
        (lambda: analyze([RUN]), ("Versions", "p@3", "Actions")),
        (
            lambda: compare_rewards("p@<0>", "p@3", {"a": [0], "b": [0]}, {"a": [1], "b": [1]}),
            ("p@<0> → p@3: +1.000",),
        ),
    ],
)
def test_a_value_shows_itself_in_any_environment_alike(
    make: Callable[[], Any], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = make()
    html = shown._repr_html_()
    inner = re.sub(r"</?(pre|span|div)\b[^>]*>", "", html)
    assert "<" not in inner, "what a value holds is no markup"
    said = inner.replace("&lt;", "<").replace("&gt;", ">")
    assert [word for word in words if word not in said] == []
    assert html.startswith(("<pre ", "<div>"))
    for name, value in {"NO_COLOR": "1", "COLUMNS": "20", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    assert shown._repr_html_() == html


def test_a_fit_plots_itself(tmp_path: Any) -> None:
    figure = RESULT.plot(tmp_path / "new" / "curve.png", "Mails")
    image = figure._repr_png_()
    assert image.startswith(b"\x89PNG") and figure.axes[0].get_title(loc="left") == "Mails"
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert {line.get_label() for line in figure.axes[0].lines} >= {"training batch, mean"}


class Handle:
    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, html: Any) -> None:
        self.shown.append(html.data)


def test_a_cell_shows_its_newest_lines_in_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shell:
        execution_count = 3

    handle, shell = Handle(), Shell()

    def display(html: Any, *, display_id: bool) -> Handle:
        assert display_id and not handle.shown
        handle.update(html)
        return handle

    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    monkeypatch.setattr("IPython.display.display", display)
    cell = Cell()
    for number in range(45):
        cell.add(Text(f"line {number}."))
    cell.draw("below")
    last = handle.shown[-1]
    assert "… 5 lines before these" in last and "line 4." not in last
    assert last.index("line 5.") < last.index("line 44.") < last.index("below")
    assert not cell.over
    shell.execution_count = 4
    assert cell.over
