"""Every code block of the documentation runs, or names only commands and settings that exist."""

import functools
import re
import shlex
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer.main

from langchain_art import Trainer
from langchain_art.cli.main import app
from langchain_art.cli.new import find_example
from langchain_art_server import __main__ as serve
from langchain_art_server import backups
from langchain_art_server.config import load_settings
from tests.support.judges.ranking_judge import RankingJudge
from tests.support.live_server import LiveServer
from tests.support.pages import PAGES, REPO, Block, blocks, run_page

#: In tests of their own, with the services that their blocks talk to.
ELSEWHERE = (
    "judging.md",
    "from-an-evaluation.md",
    "traces.md",
    "other-frameworks.md",
    "deploy.md",
    "environments.md",
)
BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON_PAGES = sorted(
    {block.page for block in BLOCKS if block.language == "python" and "notest" not in block.options}
)
MOST_NOT_RUN = 6


def label(page: Path) -> str:
    return page.relative_to(REPO).as_posix()


def of_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize(
    "page", [page for page in PYTHON_PAGES if page.name not in ELSEWHERE], ids=label
)
def test_the_python_blocks_of_a_page_run(
    page: Path,
    art_server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    monkeypatch.setitem(Trainer.__init__.__kwdefaults__, "group_size", 4)  # half
    given = {"__name__": "page", "judge": RankingJudge()}  # in the place of a paid model
    assert run_page(page, given, lambda: capsys.readouterr().out) > 0


def test_few_python_blocks_are_not_run_and_each_says_why() -> None:
    left_out = [block for block in of_language("python") if "notest" in block.options]
    assert len(left_out) <= MOST_NOT_RUN, [block.place for block in left_out]
    assert all(len(block.options["notest"]) > 10 for block in left_out)
    assert {"py", "pycon", "Python"}.isdisjoint(block.language for block in BLOCKS)


SERVER_COMMANDS = {"serve": serve.cli, "scrub": backups.cli, "backup": backups.cli}


def shell_commands() -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for block in of_language("bash", "sh", "shell", "console"):
        lines = block.code.replace("\\\n", " ").splitlines()
        for line in lines:
            for command in re.split(r"&&|\|(?!\|)|;", line.split(" #")[0]):
                words = shlex.split(command, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if words:
                    found.append((block.place, words))
    return found


def problem_with(words: list[str]) -> str | None:
    """What is wrong with a command; None if it is nothing, or none of ours."""
    program, *arguments = words
    if Path(program).name == "langchain-art":
        return problem_with_ours(arguments)
    if program == "make":
        makefile = (REPO / "Makefile").read_text()
        for word in arguments:
            name = word.partition("=")[0]
            known = rf"\$\((?:if \$\()?{name}\b" if "=" in word else rf"^{re.escape(name)}:"
            if not re.search(known, makefile, re.MULTILINE):
                return f"the Makefile has no {name}"
    if Path(program).name.startswith("python") and arguments[:1] == ["-m"]:
        return None if find_spec(arguments[1]) else f"there is no module {arguments[1]}"
    if program == "pip":
        project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
        named = [m for word in arguments for m in re.findall(r"^langchain-art\[(.*)\]$", word)]
        missing = {extra for names in named for extra in names.split(",")} - set(
            project["optional-dependencies"]
        )
        return f"there is no extra {missing}" if missing else None
    for flag in ("-f", "-r"):
        if program in ("docker", "pip") and flag in arguments:
            file = arguments[arguments.index(flag) + 1]
            return None if (REPO / file).exists() else f"there is no file {file}"
    return None


#: A Typer application's command, made once.
command_of = functools.cache(typer.main.get_command)


def problem_with_ours(arguments: list[str]) -> str | None:
    command: Any = command_of(app)
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
        if name not in command.commands:
            return f"langchain-art has no command {name}"
        command = command.commands[name]
        if name in SERVER_COMMANDS:  # their options are the server's own
            command = command_of(SERVER_COMMANDS[name])
            command = getattr(command, "commands", {}).get(name, command)
        if name == "demo" and arguments and not arguments[0].startswith("-"):
            train = import_module(f"examples.{find_example(arguments[0])}.train")
            demo = typer.Typer()
            demo.command("demo")(train.main)  # its options are the example's own
            command = typer.main.get_command(demo)
    known = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    flags = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    unknown = flags - known - {"--help"}
    return f"{command.name} has no option {unknown}" if unknown else None


def test_commands_and_their_options_exist() -> None:
    commands = shell_commands()
    assert len([words for _, words in commands if words[0] == "langchain-art"]) > 10
    assert [(at, words, why) for at, words in commands if (why := problem_with(words))] == []


def test_a_command_that_does_not_exist_is_found() -> None:
    for line in (
        *("langchain-art sing", "langchain-art serve m --no-such-flag"),
        *("make no-such-target", "make demo NO_SUCH=1", "python -m no_such_module"),
        *("pip install langchain-art[nothing]", "docker build -f no/such/file"),
    ):
        assert problem_with(line.split()), line


def test_settings_are_accepted_by_the_server(tmp_path: Path) -> None:
    for block in of_language("toml"):
        file = tmp_path / f"{block.page.stem}-{block.line}.toml"
        given = tomllib.loads(block.code)
        file.write_text(block.code if "model" in given else f'model = "any"\n{block.code}')
        load_settings(file)
