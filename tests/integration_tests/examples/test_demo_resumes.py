"""The demo, stopped and run again, goes on; finished and run again, it runs nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from examples.email_search import train as demo
from examples.support.command import train_command
from langchain_art import ArtClient
from langchain_art.training import fit_state
from langchain_art.training.records import StepRecord
from tests.support.live_server import LiveServer


def test_the_demo_goes_on_where_it_was_stopped(
    art_server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {"held_out": 2, "groups_per_step": 2, "group_size": 2}
    small = replace(demo.DEMO, policies=("demo-resumed",), **sizes)
    main = train_command(small, "The demo, with little.", demo.options)
    options: dict[str, Any] = {"steps": 2, "out": tmp_path, "base_url": art_server.base_url}
    append = fit_state.History.append

    def stopped(self: fit_state.History, record: Any) -> None:
        append(self, record)
        if isinstance(record, StepRecord):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fit_state.History, "append", stopped)
        with pytest.raises(KeyboardInterrupt):
            main(**options)
    assert "Run the same again to go on" in capsys.readouterr().out

    main(**options)
    assert "Going on after step 1" in capsys.readouterr().out
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert figures["steps"] == 2
    with ArtClient(art_server.base_url) as client:
        jobs = len(client.jobs("demo-resumed"))
    assert jobs == 2, "each step once"

    main(**options)
    assert "Finished already: 2 steps" in capsys.readouterr().out
    again = json.loads((tmp_path / "summary.json").read_text())
    assert again["after"] == figures["after"]
    assert abs(again["seconds"] - figures["seconds"]) < 1, "those of the fit, not of looking at it"

    with pytest.raises(typer.Exit):
        main(**options, seed=1)
    said = capsys.readouterr().out
    assert "seed 0 -> 1" in said.replace("\n", " ") and "--fresh erases" in said
