"""Write a lock file: what pip resolves an extra to, each release with the hash of its wheel.

    python requirements/lock.py gpu     # or local; on Linux x86-64, with the Dockerfiles' Python
    python requirements/lock.py build   # what builds the wheel

Nothing is installed. pip asks PyPI alone, whatever this machine's configuration says, so that no
build of a local mirror gets into the file. PyPI's torch for Linux is the CUDA build, so `local`
goes without it: requirements/torch-cpu.txt says which one a CPU takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
HEAD = """\
# What {what} resolves to on Linux x86-64 with CPython {python}: {count} packages.
# Written by `python requirements/lock.py {extra}`; pyproject.toml has the ranges.
#   pip install --no-deps --require-hashes -r requirements/{extra}.txt
"""
BUILD = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["build-system"]["requires"]
#: What the CUDA build of torch is and brings, by the beginnings of names.
CUDA = ("torch", "triton", "nvidia-", "cuda-")


def main(extra: str) -> None:
    """Resolve an extra and write its lock file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        argv += ["--quiet", "--only-binary=:all:", "--report", str(report)]
        argv += BUILD if extra == "build" else [f"{HERE.parent}[{extra}]"]
        clean = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
        subprocess.run(argv, check=True, env=clean | {"PIP_CONFIG_FILE": os.devnull})
        found = json.loads(report.read_text())["install"]
    pins: list[str] = []
    for one in found:
        name = one["metadata"]["name"].lower().replace("_", "-")
        if name == "langchain-art" or (extra == "local" and name.startswith(CUDA)):
            continue
        digest = one["download_info"]["archive_info"]["hashes"]["sha256"]
        pins.append(f"{name}=={one['metadata']['version']} \\\n    --hash=sha256:{digest}\n")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    what = "`build-system`" if extra == "build" else f"the extra `{extra}`"
    head = HEAD.format(extra=extra, what=what, python=python, count=len(pins))
    (HERE / f"{extra}.txt").write_text(head + "".join(sorted(pins)))


if __name__ == "__main__":
    main(sys.argv[1])
