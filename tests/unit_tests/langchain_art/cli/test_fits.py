import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from langchain_art.cli import main
from langchain_art.errors import ConfigError
from tests.support.fits import write_fit


def shown(*command: str) -> str:
    done = CliRunner().invoke(main.app, list(command), env={"COLUMNS": "80"})
    if isinstance(done.exception, ConfigError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_fit(Path("out/lr-1"), [0.1, 0.2], {0: 0.125, 1: 0.875, 2: 0.5})
    write_fit(Path("out/lr-3"), [0.3], steps=4, config={"learning_rate": 1e-3})
    return tmp_path


def test_fits_are_listed_and_compared() -> None:
    lines = shown("fits").splitlines()
    assert max(map(len, lines)) <= 80
    first, second = lines[-2].split(), lines[-1].split()
    assert first[:7] == ["lr-1", "finished", "2/2", "held", "out", "0.125", "0.875"]
    assert first[7] == "0.500" and first[-1] == "p@1"
    assert second[:5] == ["lr-3", "stopped", "1/4", "training", "0.300"]
    told = shown("fits", "lr-1", "lr-3")
    assert "lr-1 -> lr-3: config.learning_rate 1e-05 -> 0.001" in told
    [one] = json.loads(shown("fits", "lr-1", "--json"))
    assert (one["state"], one["use"], one["reward"]["best"]) == ("finished", "p@1", 0.875)


def test_curves_are_drawn() -> None:
    told = shown("curve", "lr-1", "lr-3")
    assert "lr-1: A held out 0.125 → 0.500, best 0.875 (p@1)" in told
    assert "lr-3: b training 0.300 → 0.300" in told
    assert "out/c.png" in shown("curve", "--png", "out/c.png")
    assert Path("out/c.png").read_bytes().startswith(b"\x89PNG")
    assert "out/d.png" in shown("curve", "--png", "out/d")
    assert Path("out/d.png").exists()
    with pytest.raises(ConfigError, match=r"got the image 'd\.xyz', expected a name with \.png"):
        shown("curve", "--png", "d.xyz")


def test_an_image_needs_a_library_and_says_what_goes_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install .* draws in the terminal"):
        shown("curve", "--png", "c.png")
