"""`Trainer(workers=)`: what cannot be done with it is said before anything runs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from langchain_art import ConfigError, Trainer
from tests.support.leased_agent import NAME, rollout


def trainer(out: Path, **options: Any) -> Trainer:
    return Trainer("tiny", out_dir=out, console=Console(file=io.StringIO()), **options)


def test_an_unknown_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got workers='slurm', expected one of"):
        trainer(tmp_path, workers="slurm")


@pytest.mark.parametrize("method", ["fit_sync", "evaluate_sync"])
def test_scenarios_and_rollouts_that_do_not_travel_are_refused(method: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"steps": 1} if method == "fit_sync" else {}
    mine = getattr(trainer(tmp_path, workers="server"), method)
    with pytest.raises(ConfigError, match=r"scenarios\[0\]: got tuple .* expected a JSON value"):
        mine(rollout, [(1, 2)], **more)
    with pytest.raises(ConfigError, match="expected a function of a module"):
        mine(lambda _: 1.0, ["q"], **more)
    here = getattr(trainer(tmp_path), method)
    with pytest.raises(ConfigError, match=r'expected the function, or Trainer\(workers="server"\)'):
        here(NAME, ["q"], **more)
