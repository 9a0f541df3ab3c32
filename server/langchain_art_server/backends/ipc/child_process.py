"""How the parent starts an engine's process, with one end of a socket pair."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import langchain_art
import langchain_art_server
from langchain_art.errors import ConfigError


def launch(
    argv: Sequence[str], config: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a child and return it with our end of its socket; `env` is added to ours.

    Its last arguments are the number of its end's file descriptor, and `config` as JSON.

    Raises:
        ConfigError: its Python cannot be run.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        # Not in a thread, where a cancelled start would lose the process; vfork is quick.
        try:
            process = subprocess.Popen(
                [*argv, str(theirs.fileno()), json.dumps(config)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=os.environ | env,
                # Ctrl-C reaches the parent only, which ends the child.
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ConfigError(
                f"The engine's Python cannot be run: {error}. See that the setting `python` is "
                "the path of one, such as /opt/learner/bin/python."
            ) from error
    return process, ours


def package_links() -> tempfile.TemporaryDirectory[str]:
    """A folder with links to the two packages and nothing else of the server's environment."""
    folder = tempfile.TemporaryDirectory(prefix="art-packages-")
    for package in (langchain_art, langchain_art_server):
        home = Path(package.__path__[0]).resolve()
        Path(folder.name, home.name).symlink_to(home, target_is_directory=True)
    return folder
