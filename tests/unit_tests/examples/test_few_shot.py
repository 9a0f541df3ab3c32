"""The option ``--few-shot`` of the evaluations of examples."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from examples.codenames.train import DEMO
from examples.support.command import evaluate_command


def test_an_example_that_knows_no_solutions_refuses_it() -> None:
    program = typer.Typer()
    program.command()(evaluate_command(DEMO))
    done = CliRunner().invoke(program, ["--few-shot", "2"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "codenames has no solved scenarios to show" in done.output
