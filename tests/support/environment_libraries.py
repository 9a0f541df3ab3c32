"""Libraries of environments that are not beside the tests: heavy, or asking for other packages."""

import os
import subprocess
from pathlib import Path

from tests.support.environments import environment
from tests.support.live_server import REPO

#: Library -> the Python that it needs; None: any.
APART = {"openenv": None, "verifiers": None, "harbor": "3.12"}


def python_of(name: str) -> Path:
    # Harbor brings litellm: what a judge by name needs besides is small.
    extras = "harbor,ruler" if name == "harbor" else name
    return environment(f"environment-{name}", ["-e", f"{REPO}[{extras}]"], APART[name])


def told(name: str, folder: Path, *argv: str, code: str = "") -> str:
    """The last line that a program prints in the environment of a library."""
    done = subprocess.run(
        [str(python_of(name)), *argv],
        input=code,
        cwd=folder,
        # Harbor's LiteLLM would ask GitHub for prices.
        env=os.environ | {"PYTHONPATH": str(REPO), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]
