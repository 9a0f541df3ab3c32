"""`langchain-art launch`: a server on a GPU of a cloud, by SkyPilot's command."""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from langchain_art._version import __version__
from langchain_art.cli.options import console
from langchain_art.errors import ConfigError
from langchain_art.wire.api_keys import key_problem, new_api_key

YAML = Path("server", "deploy", "skypilot.yaml")
PORT = 8000
#: Minutes without a running server until the machine ends, as in the YAML.
AUTOSTOP_MINUTES = 15
_INSTALL = (
    'install it in an environment of its own, such as by: uv tool install "skypilot[aws]" (or '
    "lambda, runpod, gcp, kubernetes …), and give it your cloud's account; `sky check` says which "
    "it can use"
)


def launch(
    context: typer.Context,
    gpus: Annotated[str | None, typer.Option(help="GPU:NUMBER. Default H100:1.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Base model, a hub name. Default Qwen/Qwen3-8B.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy; may be repeated. Default my-agent.")
    ] = None,
    idle_minutes: Annotated[
        int | None, typer.Option(min=1, help="End so long after the last call. Default 60.")
    ] = None,
    name: Annotated[
        str, typer.Option("--name", "-c", help="SkyPilot's name of the machine.")
    ] = "langchain-art",
    delete_when_idle: Annotated[
        bool,
        typer.Option("--delete-when-idle", help="Delete it then, with its disk and all versions."),
    ] = False,
    tear_down: Annotated[
        bool, typer.Option("--tear-down", help="Delete the machine and all that is on it.")
    ] = False,
) -> None:
    """Rent a GPU in a cloud by SkyPilot, and start a server there.

    SkyPilot shows what the machine costs an hour, and asks before it rents it.

    An hour after the last call the server ends, and 15 minutes later the machine is stopped. Its
    disk is kept, with the versions on it, and costs what the cloud asks for disks. Where a cloud
    cannot stop a machine it is deleted, and you are told so at the start.

    All other options are those of `sky launch`, such as --infra, --use-spot or --dryrun. The key is
    ART_API_KEY, or a new one.

    \b
    Examples:
      langchain-art launch --gpus H100:1
      langchain-art launch --gpus H200:1 --model Qwen/Qwen3-4B --infra lambda
      langchain-art launch --tear-down
    """
    sky = shutil.which("sky")
    if sky is None:
        raise ConfigError(
            "got no command `sky` on PATH, expected SkyPilot's, which rents the machine; "
            + _INSTALL
        )
    _refuse_stray(context.args)
    if tear_down:
        said = f"What is on {name} is deleted, its versions too; `langchain-art export` keeps one."
        console.print(said, highlight=False, soft_wrap=True)
        raise typer.Exit(subprocess.run([sky, "down", name, *context.args]).returncode)
    key = os.environ.get("ART_API_KEY") or new_api_key()
    if problem := key_problem(key):
        raise ConfigError(f"ART_API_KEY: {problem}")
    envs = {
        "MODEL": model,
        "POLICIES": " ".join(policy) if policy else None,
        "IDLE_MINUTES": idle_minutes,
    }
    argv = launch_argv(files_root(), name, gpus, envs, context.args)
    Console(stderr=True).print(shlex.join(["sky", *argv]), highlight=False, soft_wrap=True)
    status = subprocess.run([sky, *argv], env=os.environ | {"ART_API_KEY": key}).returncode
    if status or "--dryrun" in context.args:
        raise typer.Exit(status)
    kept = False
    if not delete_when_idle:  # by this command SkyPilot looks whether the cloud can stop a machine
        minutes = str(AUTOSTOP_MINUTES)
        kept = not subprocess.run([sky, "autostop", name, "-i", minutes, "--yes"]).returncode
        if not kept:
            said = "This machine cannot be stopped and will be deleted when idle: export versions."
            Console(stderr=True).print(said, style="yellow", soft_wrap=True)
    ends = "stopped, its disk kept" if kept else "deleted, its versions too"
    typer.echo(_lines(_address(sky, name), key, name, policy[0] if policy else "my-agent", ends))


def _refuse_stray(arguments: list[str]) -> None:
    """Sky would take a word that is no option, nor an option's value, for the program to run."""
    for before, word in zip(["", *arguments], arguments, strict=False):
        if not before.startswith("-") and not word.startswith("-"):
            raise ConfigError(
                f"got {word!r}, expected options alone, such as --gpus H100:1 --model "
                "Qwen/Qwen3-8B; `langchain-art launch --help` lists them"
            )


def files_root() -> Path:
    """The folder that is sent to the machine: a checkout, or the files of an installed package.

    Raises:
        ConfigError: this installation has neither.
    """
    package = Path(__file__).parents[1]
    for root in (package.parent, package / "_box"):
        if (root / YAML).is_file():
            return root
    raise ConfigError(
        f"got an installation without {YAML} ({package}), expected a checkout of the repository "
        "or a wheel; install the package again"
    )


def launch_argv(
    root: Path,
    name: str,
    gpus: str | None,
    envs: dict[str, str | int | None],
    more: list[str],
) -> list[str]:
    """Arguments of ``sky`` that rent a machine. The key is in the environment, never among them.

    Args:
        root: what `files_root` gives.
        name: SkyPilot's name of the machine.
        gpus: as SkyPilot writes them, ``H100:1``; None: the YAML's.
        envs: variables of the YAML's `envs`; None: its value.
        more: options of ``sky launch``.
    """
    given = {name: value for name, value in envs.items() if value is not None}
    if not (root / "pyproject.toml").is_file():
        given["ART_VERSION"] = __version__
    argv = ["launch", "-c", name, "-d", "--workdir", str(root), "--secret", "ART_API_KEY"]
    argv += ["--gpus", gpus] if gpus is not None else []
    for variable, value in given.items():
        argv += ["--env", f"{variable}={value}"]
    return [*argv, *more, str(root / YAML)]


def _address(sky: str, name: str) -> str:
    """``http://HOST:PORT`` of the machine's server."""
    argv = [sky, "status", "--endpoint", str(PORT), name]
    done = subprocess.run(argv, capture_output=True, text=True)
    lines = done.stdout.split()
    if done.returncode or not lines:
        raise ConfigError(
            f"{name} was rented and costs money, but `{shlex.join(['sky', *argv[1:]])}` does not "
            f"say its address; ask again, or: sky down {name}\n{done.stderr.strip()}"
        )
    found = lines[-1].rstrip("/")
    return found if "://" in found else f"http://{found}"


def _lines(address: str, key: str, name: str, policy: str, ends: str) -> str:
    return f"""
The machine is rented. Packages and model take minutes; watch: sky logs {name}

  export ART_BASE_URL={address}/v1
  export ART_API_KEY={key}
  langchain-art status

In a program:
  ChatART(model="{policy}", base_url="{address}/v1")

There is no TLS: key and messages can be read on the way. Through SSH they cannot:
  ssh -N -L {PORT}:localhost:{PORT} {name}      # then ART_BASE_URL=http://localhost:{PORT}/v1

When nobody calls it any more it is {ends}. Now:
  langchain-art export {policy} ./{policy}      # keep what serves
  langchain-art launch --tear-down{"" if name == "langchain-art" else f" -c {name}"}"""
