"""Starts of vLLM that fail: refused in words, and nothing is left behind."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from langchain_art.errors import ConfigError, EngineUnavailable
from langchain_art_server.backends.vllm.sampler import VllmSampler
from langchain_art_server.config import Settings
from tests.support.environments import vllm_python
from tests.support.vllm_engine import gone, vllm_table

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: A `sitecustomize` with which the processes that vLLM starts do not end by themselves.
HANGS = """\
import sys, threading, time
if any("spawn_main" in arg for arg in sys.orig_argv):
    threading.Thread(target=time.sleep, args=(3600,)).start()
"""


def started_by(python: Path) -> list[int]:
    """The processes that have the folder of `python` in their environment."""
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f"PYTHONPATH={python.parent}".encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
    return found


def sampler_of(model: Path, data_dir: Path, table: dict[str, Any]) -> VllmSampler:
    told = {"model": str(model), "data_dir": data_dir, "sampler": table}
    return VllmSampler(Settings.model_validate(told))


async def test_a_python_without_vllm_is_refused_in_words(vllm_model: Path, tmp_path: Path) -> None:
    nowhere, ours = vllm_table() | {"python": "/nowhere/python"}, vllm_table()
    del ours["python"]
    for table, words in ((nowhere, "No such file"), (ours, "No module named 'vllm'")):
        made = sampler_of(vllm_model, tmp_path, table)
        with pytest.raises(EngineUnavailable, match="not started"):
            _ = made.info
        with pytest.raises(ConfigError, match=words):
            await made.start()
        await made.close()


async def test_a_start_that_fails_is_told_with_its_first_cause(
    vllm_model: Path, tmp_path: Path
) -> None:
    made = sampler_of(vllm_model, tmp_path, vllm_table(kv_cache_bytes=1 << 50))
    with pytest.raises(ConfigError) as refused:
        await made.start()
    await made.close()
    said = str(refused.value).split("it said:\n")[1].splitlines()
    assert said[0].startswith("ValueError: Available memory on node 0")
    assert said[-1].startswith("RuntimeError: Engine core initialization failed.")


async def test_an_engine_that_fails_and_does_not_end_is_ended(
    vllm_model: Path, tmp_path: Path
) -> None:
    """The first cause of its failure is told first."""
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {vllm_python()} "$@"\n')
    python.chmod(0o755)
    table = vllm_table(kv_cache_bytes=1 << 50, python=str(python))
    made = sampler_of(vllm_model, tmp_path / "data", table)
    with pytest.raises(ConfigError, match="did not end within 20 s of its engine") as refused:
        await made.start()
    await made.close()
    assert "it said:\nValueError: Available memory on node 0" in str(refused.value)
    assert gone(started_by(python))
