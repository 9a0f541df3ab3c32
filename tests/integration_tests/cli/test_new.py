"""`langchain-art new`: an example as a project of its own, whose test passes where it stands."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from langchain_art.cli.main import app
from langchain_art.cli.new import SKILL, make_project, write_skill
from langchain_art.errors import ConfigError
from tests.support import forked_start
from tests.support.live_server import REPO
from tests.support.soak import in_soak

EXAMPLES = sorted(
    path.parents[1].name for path in (REPO / "examples").glob("*/base_model/config.json")
)


def environment_of(folder: Path) -> dict[str, str]:
    """For a Python that finds the two packages, but neither `examples` nor `tests` of here."""
    site = folder / "site"
    site.mkdir()
    for package in (REPO / "langchain_art", REPO / "server" / "langchain_art_server"):
        (site / package.name).symlink_to(package)
    return os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}


def test_a_demo_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, missing, said in (
        ("email-search", "langchain", r"needs langchain, .*langchain-art\[local,examples\]"),
        ("deep-agent", "deepagents", r"\[local,examples,deepagents,reasoning-gym\]"),
        ("frozen-lake", "textarena", r"frozen-lake needs textarena, not installed here; run: pip"),
    ):
        monkeypatch.setattr(
            "langchain_art.packages.find_spec",
            lambda wanted, missing=missing: None if wanted == missing else find_spec(wanted),
        )
        with pytest.raises(ConfigError, match=said):
            CliRunner().invoke(app, ["demo", name], catch_exceptions=False)


def test_every_module_of_each_project_is_imported(tmp_path: Path) -> None:
    homes: list[Path] = []
    modules: list[str] = []
    for example in EXAMPLES:
        home = tmp_path / f"my-{example}".replace("_", "-")
        package = make_project(home, example.replace("_", "-"))
        assert package == f"my_{example}"
        texts = [path.read_text() for path in home.rglob("*.py")]
        assert not [text for text in texts if re.search(r"^(from|import) examples\b", text, re.M)]
        project = tomllib.loads((home / "pyproject.toml").read_text())["project"]
        assert project["name"] == home.name
        for path in (home / package / "base_model").rglob("*"):
            assert path.stat().st_size <= 1_000_000
        (home / "tests").rename(home / f"tests_{example}")  # all are imported by one process
        homes.append(home)
        modules += [
            ".".join(path.relative_to(home).with_suffix("").parts)
            for path in home.rglob("*.py")
            if path.name != "__init__.py"
        ]
    program = (
        "import importlib, sys\n"
        "sys.modules |= dict.fromkeys(('examples', 'tests'))\n"  # as if they were not here
        "sys.path[:0] = sys.argv.pop(1).split(':')\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
    )
    args, log = [program, ":".join(map(str, homes)), *modules], tmp_path / "log"
    done = forked_start.start("tests.support.program_text", args, os.environ, tmp_path, log)
    assert done.wait() == 0, log.read_text()[-4000:]


# The same fit runs in `tests/integration_tests/examples` for the others; this one also starts a
# program of the project, its MCP server.
@in_soak
@pytest.mark.soak("B2", 1, "project of an example whose base model is built anew")
@pytest.mark.slow
def test_a_project_without_weights_builds_its_base_model_and_its_test_passes(
    tmp_path: Path,
) -> None:
    home = tmp_path / "my-agent"
    make_project(home, "mcp-server")
    shutil.rmtree(home / "my_agent" / "base_model")  # as in one that was made by a wheel
    script = home / "my_agent" / "build_base_model.py"
    text, (shipped, short) = (
        script.read_text(),
        ("SHIPPED)", 'SHIPPED, [*sys.argv[1:], "--smoke"])'),
    )
    assert text.count(shipped) == 1
    script.write_text(
        text.replace(shipped, short).replace("from pathlib", "import sys\nfrom pathlib")
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=home,
        env=environment_of(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "error" not in done.stdout
    assert (home / "out" / "base_models" / "my_agent" / "config.json").is_file()


def test_what_is_no_project_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for directory, example, words in (
        ("my-agent", "chess", "expected one of: "),
        ("3d", "email-search", "a letter first"),
        ("class", "email-search", "no word of Python"),
        ("langchain-art", "email-search", "is taken"),
        ("full", "email-search", "expected a new directory"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_project(tmp_path / directory, example)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_the_skill_is_written_into_a_project(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["new", str(tmp_path), "--skill"])
    assert said.exit_code == 0, said.output
    path = tmp_path / ".claude" / "skills" / "langchain-art" / "SKILL.md"
    assert path.read_text() == SKILL.read_text()
    assert path.read_text().startswith("---\nname: langchain-art\ndescription: ")
    assert len(path.read_text().splitlines()) < 90
    assert write_skill(tmp_path) == path, "again, unchanged"
    path.write_text("my own words")
    with pytest.raises(ConfigError, match="with other words"):
        write_skill(tmp_path)
    assert path.read_text() == "my own words"
    with pytest.raises(ConfigError, match="expected a project's directory"):
        write_skill(tmp_path / "none")
    neither = CliRunner().invoke(app, ["new", str(tmp_path / "x")])
    assert isinstance(neither.exception, ConfigError) and "neither --from" in str(neither.exception)
