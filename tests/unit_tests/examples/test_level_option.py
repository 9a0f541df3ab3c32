"""The option ``--level`` of the examples that have several."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from examples.codenames import train as codenames
from examples.codenames.environment import LEVELS
from examples.support.command import Given, level_options
from examples.temporal_clue import train as temporal_clue


@pytest.mark.parametrize(("module", "last"), [(codenames, 3), (temporal_clue, 4)])
def test_a_level_that_is_not_there_is_refused(module: ModuleType, last: int) -> None:
    program = typer.Typer()
    program.command()(module.main)
    done = CliRunner().invoke(program, ["--level", str(last + 1)], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "Invalid value for '--level'" in done.output
    assert f" {last} " in done.output


def test_the_level_goes_to_the_build_and_to_the_folder() -> None:
    options = level_options(codenames.build_fit, LEVELS, "Size")
    given = Given(codenames.DEMO, 2, True, None, None)
    hard = options(given, level=3)
    assert hard["out"] == Path("out/demo-codenames-seed2-control-level3")
    assert hard["demo"].build.func is codenames.build_fit
    assert hard["demo"].build.keywords == {"level": 3}
    assert options(given)["out"] == Path("out/demo-codenames-seed2-control")
