"""The examples, and a project made from one: its package, base model, settings and a test."""

from __future__ import annotations

import keyword
import re
import shutil
from pathlib import Path

from langchain_art.errors import ConfigError
from langchain_art.packages import require_packages

#: Extras of langchain-art beside `local` and `examples`, by example.
EXTRAS = {"mcp_server": ("mcp",), "deep_agent": ("deepagents", "reasoning-gym")}
_TAKEN = ("tests", "examples", "langchain_art", "langchain_art_server")
_TEXTS = (".py", ".md", ".toml")
#: The skill that is written into projects; one of the pages whose code is tested.
SKILL = Path(__file__).with_name("skill.md")

_PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "{project}"
version = "0.0.1"
description = "An agent that learns from its own runs, made from the example {example}."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["langchain-art[{extras}]"]

[dependency-groups]
dev = ["pytest>=8.3"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

_README = """\
# {project}

Made from the example `{example}` of langchain-art. `{package}/agent.py` is the LangGraph program,
`{package}/train.py` says what is good; the task is in the modules beside them.

```bash
pip install -e . --group dev            # pip 25.1 or newer
python -m {package}.train               # on this machine: server, training, evaluation, plot
python -m pytest                        # a short fit
```

With a large model on a GPU:

```bash
langchain-art serve --config server.toml
python -m {package}.train --base-url http://HOST:8000/v1 --learning-rate 2e-5 --max-tokens 512
python -m {package}.evaluate --base-url http://HOST:8000/v1 --max-tokens 512
```
"""

_EVALUATE = '''\
"""Evaluate a version on held-out scenarios: ``python -m {package}.evaluate``."""

import typer

from {package}.support.command import evaluate_command
from {package}.train import DEMO

if __name__ == "__main__":
    typer.run(evaluate_command(DEMO))
'''

_TEST = '''\
"""A short fit on a real server: the policy gets a version that was trained on its runs."""

from dataclasses import replace
from pathlib import Path

from {package}.support.demo import run
from {package}.train import DEMO


def test_a_short_fit(tmp_path: Path) -> None:
    small = replace(DEMO, groups_per_step=4, group_size=4, held_out=8)
    found = run(small, out=tmp_path, steps=1)
    assert found["steps"] == 1
    assert found["before"]["n"] == found["after"]["n"] == 8
    assert (tmp_path / "transcripts.md").read_text().startswith("# ")
'''


def make_project(directory: Path, name: str) -> str:
    """Copy the example `name` into `directory` as a project of its own; returns its package's name.

    Imports and paths are rewritten: ``examples.tic_tac_toe`` becomes ``my_agent``, and
    ``examples.support`` becomes ``my_agent.support``.

    Raises:
        ConfigError: there is no such example, the directory has something in it, or its name is no
            name of a package.
    """
    example, root, package = find_example(name), examples_root(), _package_name(directory)

    def rewritten(text: str) -> str:
        for old, new in ((example, package), ("support", f"{package}.support")):
            text = re.sub(rf"\bexamples\.{old}\b", new, text)
            text = re.sub(rf"\bexamples/{old}\b", new.replace(".", "/"), text)
        return text

    def copied(source: str, to: str) -> None:
        if source.endswith(_TEXTS):
            Path(to).write_text(rewritten(Path(source).read_text()))
        else:
            shutil.copyfile(source, to)

    own = shutil.ignore_patterns("__pycache__")
    for folder, to in ((example, package), ("support", f"{package}/support")):
        source = root / "examples" / folder
        shutil.copytree(source, directory / to, ignore=own, copy_function=copied)
    if (settings := directory / package / "server.toml").exists():
        settings.rename(directory / "server.toml")
    extras = ",".join(("local", "examples", *EXTRAS.get(example, ())))
    project = directory.resolve().name
    words = {"project": project, "package": package, "example": name, "extras": extras}
    (directory / "tests").mkdir(exist_ok=True)
    for file, template in {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"{package}/evaluate.py": _EVALUATE,
        "tests/test_fit.py": _TEST,
    }.items():
        (directory / file).write_text(template.format(**words))
    return package


def write_skill(directory: Path) -> Path:
    """Write the skill for coding agents into a project's directory; returns its path.

    Raises:
        ConfigError: there is no such directory, or the skill there was changed.
    """
    if not directory.is_dir():
        raise ConfigError(f"got {directory}, expected a project's directory, or --from as well")
    path = directory / ".claude" / "skills" / "langchain-art" / "SKILL.md"
    text = SKILL.read_text()
    if path.exists() and path.read_text() != text:
        raise ConfigError(f"got {path} with other words; move it away, then write it again")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _package_name(directory: Path) -> str:
    """The name of the package in `directory`, a new one. Or ConfigError."""
    project = directory.resolve().name
    package = project.replace("-", "_").casefold()
    if not re.fullmatch(r"[a-z]\w*", package, re.ASCII) or keyword.iskeyword(package):
        raise ConfigError(
            f"got the directory {project!r}, expected a name such as my-agent: letters, digits and "
            "hyphens, a letter first, and no word of Python"
        )
    if package in _TAKEN:
        raise ConfigError(f"got the directory {project!r}, whose name is taken; choose another")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"got {directory}, which is there already, expected a new directory")
    return package


#: The demo without a name.
EMAIL = "email-search"


def examples_root() -> Path:
    """The folder that has ``examples``.

    Raises:
        ConfigError: this installation has no examples.
    """
    package = Path(__file__).parents[1]
    for root in (package.parent, package / "_examples"):
        if (root / "examples" / "support" / "demo.py").is_file():
            return root
    raise ConfigError(
        f"got an installation without the examples ({package}), expected those of the repository "
        "or of a wheel; install the package again"
    )


def example_names() -> list[str]:
    """The examples that are trained, as ``langchain-art demo NAME`` has them, sorted."""
    trained = (examples_root() / "examples").glob("*/train.py")
    return sorted(path.parent.name.replace("_", "-") for path in trained)


def require_imports(package: str) -> None:
    """Raise ConfigError if something that an example imports is not installed."""
    texts = (path.read_text() for path in (examples_root() / "examples" / package).glob("*.py"))
    imported = {name for text in texts for name in re.findall(r"(?m)^(?:from|import) (\w+)", text)}
    who = f"The example {package.replace('_', '-')}"
    extras = ("local", "examples", *EXTRAS.get(package, ()))
    require_packages(who, sorted(imported - {"examples"}), *extras)


def find_example(name: str) -> str:
    """The package of an example below ``examples``: ``tic_tac_toe`` for ``tic-tac-toe``.

    Raises:
        ConfigError: none of them is called so.
    """
    found = example_names()
    if (known := name.replace("_", "-")) not in found:
        raise ConfigError(f"got the example {name!r}, expected one of: {', '.join(found)}")
    return known.replace("-", "_")
