"""Libraries of environments that are not beside the tests: heavy, or asking for other packages."""

import os
import subprocess
from pathlib import Path

from tests.support.environments import environment
from tests.support.live_server import REPO

#: Library -> the Python that it needs; None: any.
APART = {"openenv": None, "verifiers": None, "harbor": "3.12"}
#: By library, packages that it imports and no test uses: half of the import's seconds.
STAND_INS = REPO / "tests/support/stand_ins"


def python_of(name: str) -> Path:
    return environment(f"environment-{name}", ["-e", f"{REPO}[{name}]"], APART[name])


def told(name: str, folder: Path, *argv: str, code: str = "") -> str:
    """The last line that a program prints in the environment of a library."""
    done = subprocess.run(
        [str(python_of(name)), *argv],
        input=code,
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": f"{REPO}{os.pathsep}{STAND_INS / name}"}
        | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # Harbor's; else it asks GitHub for prices
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]
