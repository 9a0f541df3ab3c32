"""`launch` with a scripted `sky`, which notes how it is called: no test can rent a machine.

What SkyPilot's own parser makes of these arguments: ``tests/integration_tests/launch``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from langchain_art._version import __version__
from langchain_art.cli.launch import YAML, files_root, launch_argv
from langchain_art.cli.main import app
from langchain_art.errors import ConfigError
from langchain_art.wire.api_keys import key_problem, new_api_key

SCRIPT = """#!/bin/sh
echo "$@" >> "$0.calls"
printenv ART_API_KEY >> "$0.keys"
[ "$1" != status ] || cat "$0.address"
[ "$1" = status ] || exit $(cat "$0.$1")
"""


class Sky:
    """The command, in a folder that is all of PATH."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "sky"
        self.path.write_text(SCRIPT)
        self.path.chmod(0o755)
        self.address("203.0.113.7:8000\n")
        for command in ("launch", "autostop", "down"):
            self.ends_with(0, command)

    def address(self, text: str) -> None:
        self.path.with_suffix(".address").write_text(text)

    def ends_with(self, status: int, command: str = "launch") -> None:
        self.path.with_suffix(f".{command}").write_text(str(status))

    def noted(self, what: str) -> list[str]:
        return self.path.with_suffix(f".{what}").read_text().splitlines()


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sky:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("ART_API_KEY", raising=False)
    return Sky(tmp_path)


def launch(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["launch", *arguments])


def test_a_machine_is_rented_and_its_address_told(sky: Sky) -> None:
    done = launch("--gpus", "H200:2", "--infra", "lambda", "--policy", "a", "--policy", "b")
    assert done.exit_code == 0, done.output
    called, stopped, asked = sky.noted("calls")
    root = files_root()
    assert called == (
        f"launch -c langchain-art -d --workdir {root} --secret ART_API_KEY --gpus H200:2 "
        f"--env POLICIES=a b --infra lambda {root / YAML}"
    )
    assert stopped == "autostop langchain-art -i 15 --yes"
    assert asked == "status --endpoint 8000 langchain-art"
    assert "export ART_BASE_URL=http://203.0.113.7:8000/v1\n" in done.stdout
    assert 'ChatART(model="a", base_url="http://203.0.113.7:8000/v1")' in done.stdout


def test_the_key_is_new_and_told_in_the_environment_alone(sky: Sky) -> None:
    keys: list[str] = []
    for _ in range(2):
        found = re.search(r"export ART_API_KEY=(\S+)\n", launch().stdout)
        assert found is not None and key_problem(found[1]) is None
        keys.append(found[1])
        assert sky.noted("keys")[-1] == found[1]
        assert found[1] not in "".join(sky.noted("calls"))
    assert keys[0] != keys[1]


def test_a_key_that_is_set_is_taken(sky: Sky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_API_KEY", key := new_api_key())
    assert f"export ART_API_KEY={key}\n" in launch().stdout
    monkeypatch.setenv("ART_API_KEY", "short")
    assert isinstance(refused := launch().exception, ConfigError)
    assert "ART_API_KEY" in str(refused)


def test_what_sky_refuses_ends_it(sky: Sky) -> None:
    """As when the price was declined: nothing is asked for, no address is told."""
    sky.ends_with(3)
    done = launch()
    assert done.exit_code == 3 and "ART_BASE_URL" not in done.stdout
    assert len(sky.noted("calls")) == 1


def test_a_dry_run_rents_nothing(sky: Sky) -> None:
    assert "ART_BASE_URL" not in launch("--dryrun").stdout
    assert len(sky.noted("calls")) == 1


def test_a_machine_without_an_address_is_told_of(sky: Sky) -> None:
    sky.address("")
    assert isinstance(refused := launch().exception, ConfigError)
    assert "costs money" in str(refused) and "sky down langchain-art" in str(refused)


@pytest.mark.parametrize(("status", "ends"), [(0, "stopped, its disk kept"), (1, "deleted")])
def test_the_disk_is_kept_where_the_cloud_can(sky: Sky, status: int, ends: str) -> None:
    sky.ends_with(status, "autostop")
    done = launch()
    assert sky.noted("calls")[1] == "autostop langchain-art -i 15 --yes"
    assert done.exit_code == 0 and f"it is {ends}" in done.stdout
    assert ("cannot be stopped" in done.stderr) == bool(status)


def test_it_is_deleted_when_idle_if_that_is_asked_for(sky: Sky) -> None:
    done = launch("--delete-when-idle")
    assert not any("autostop" in call for call in sky.noted("calls"))
    assert "it is deleted, its versions too" in done.stdout


def test_tear_down_deletes_the_machine(sky: Sky) -> None:
    done = launch("--tear-down", "-c", "mine", "--yes")
    assert done.exit_code == 0 and "langchain-art export" in done.stdout
    assert sky.noted("calls") == ["down mine --yes"]


@pytest.mark.parametrize("stray", [["H100:1"], ["--use-spot", "yes", "H100"]])
def test_words_that_sky_would_run_are_refused(sky: Sky, stray: list[str]) -> None:
    assert isinstance(refused := launch(*stray).exception, ConfigError)
    assert repr(stray[-1]) in str(refused)


def test_without_skypilot_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert isinstance(refused := launch().exception, ConfigError)
    assert 'uv tool install "skypilot[aws]"' in str(refused)


def test_without_a_checkout_the_release_is_installed_there(tmp_path: Path) -> None:
    argv = launch_argv(tmp_path, "c", None, {"MODEL": None}, [])
    assert f"--env ART_VERSION={__version__}" in " ".join(argv)
    (tmp_path / "pyproject.toml").touch()
    assert "--env" not in launch_argv(tmp_path, "c", None, {"MODEL": None}, [])
