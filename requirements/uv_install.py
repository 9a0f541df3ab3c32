"""Run ``uv pip install`` in this Python's environment, with the indexes that pip is configured for.

    python requirements/uv_install.py -e '.[local]'    # the Makefile's words run it

uv fetches and unpacks side by side and takes a tenth of pip's CPU time, but reads none of pip's
settings.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

UV = Path(sys.executable).parent / "uv"
#: What pip's configuration calls a thing; uv's variable for it, and what stands between its values.
_NAMES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}


def main(arguments: list[str]) -> int:
    """Install; uv's exit status. A terminal gets its progress bars."""
    argv = [UV, "pip", "install", "--python", sys.executable, *arguments]
    argv += [] if sys.stderr.isatty() else ["--quiet"]
    return subprocess.run(argv, env=uv_environment(), check=False).returncode


def uv_environment() -> dict[str, str]:
    """The environment for uv; its own settings come first.

    As with pip, the best release of all indexes is taken, not that of the first index that has any.
    """
    return _indexes() | os.environ


@cache
def _indexes() -> dict[str, str]:
    """Variables for the indexes that pip is configured to use, here or by its environment."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    said: dict[tuple[str, str], str] = {}
    for line in listed.splitlines():
        place, _, value = line.partition("=")
        section, _, key = place.rpartition(".")
        said[section, key] = ast.literal_eval(value)
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for section in ("global", "install", ":env:"):  # the later overrides the earlier, as in pip
        for key, (name, between) in _NAMES.items():
            if (section, key) in said:
                found[name] = between.join(said[section, key].split())
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
