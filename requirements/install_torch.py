"""Install the torch of requirements/torch-cpu.txt: where there is no GPU, PyTorch's CPU build.

    python requirements/install_torch.py    # `make install` runs it, in the virtual environment

PyPI's torch for Linux is the CUDA build. Without a GPU, PyTorch's own index is asked too: its
``+cpu`` builds go before those of PyPI. Where that index does not answer, what pip would fetch
instead, and how large it is, is printed before any of it is fetched.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PIN = Path(__file__).parent / "torch-cpu.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: Seconds for an answer of an index.
PATIENCE = 10.0
#: Of packages that a build for CUDA brings, by the beginnings of their names.
CUDA = ("nvidia-", "cuda-")


def main() -> int:
    """Say what is done, and do it; uv's exit status."""
    arguments, words = plan()
    sys.stderr.write(f"{words}\n")
    install = [sys.executable, str(Path(__file__).with_name("uv_install.py")), *arguments]
    return subprocess.run(install, check=False).returncode


def plan(
    index: str = CPU_INDEX,
    *,
    linux: bool = sys.platform == "linux",
    gpu: Callable[[], bool] | None = None,
    python: str = sys.executable,
) -> tuple[list[str], str]:
    """Arguments of ``uv pip install``, and what to say before it runs."""
    wanted = ["-r", str(PIN)]
    if not linux or (gpu or has_gpu)():
        return wanted, "torch: the build of pip's own indexes, as this is no Linux without a GPU."
    if answers(index):
        return [*wanted, "--extra-index-url", index], f"torch: the CPU build, from {index}."
    found = resolve(wanted, python)
    if found is None:
        return wanted, f"torch: {index} does not answer, and pip finds no torch elsewhere either."
    return wanted, _instead(found, index)


def has_gpu() -> bool:
    """Whether NVIDIA's driver lists a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return any(Path("/dev").glob("nvidia[0-9]*"))
    return subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def answers(index: str) -> bool:
    """Whether an index has torch, as far as can be told now."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=PATIENCE):
            return True
    except OSError:
        return False


def resolve(wanted: list[str], python: str = sys.executable) -> list[dict[str, Any]] | None:
    """What pip would fetch, by its report; None if it finds nothing. No wheel is fetched."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        asked = pip("install", "--dry-run", "--quiet", "--report", str(report), *wanted, of=python)
        if subprocess.run(asked, check=False).returncode:
            return None
        return json.loads(report.read_text())["install"]


def size_of(url: str) -> int:
    """Bytes of a file; 0 if its server does not say."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.request.url2pathname(parts.path)).stat().st_size
    try:
        asked = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            return int(answer.headers.get("content-length") or 0)
    except OSError:
        return 0


def pip(*arguments: str, of: str = sys.executable) -> list[str]:
    """A command of pip."""
    return [of, "-m", "pip", *arguments]


def _instead(found: list[dict[str, Any]], index: str) -> str:
    """What is fetched where PyTorch's index does not answer."""
    if not found:
        return "torch: it is installed already."
    names = [one["metadata"]["name"].lower() for one in found]
    version = next(
        (one["metadata"]["version"] for one in found if one["metadata"]["name"] == "torch"), "?"
    )
    sizes = [size_of(one["download_info"]["url"]) for one in found]
    unknown = sizes.count(0)
    more = f", and {unknown} of unknown size" if unknown else ""
    total = f"{len(found)} packages, {sum(sizes) / 1e6:,.0f} MB{more}"
    instead = f"pip fetches torch {version} from its own indexes: {total}."
    said = f"torch: {index} does not answer. {instead}"
    if not any(name.startswith(CUDA) for name in names):
        return said
    return (
        f"{said}\nThis is the CUDA build, of which a machine without a GPU has no use. To take the "
        "CPU build, end this (Ctrl-C) and name a mirror of PyTorch's index, or a folder that has "
        "the wheel:\n    PIP_EXTRA_INDEX_URL=… make install\n    PIP_FIND_LINKS=… make install"
    )


if __name__ == "__main__":
    sys.exit(main())
