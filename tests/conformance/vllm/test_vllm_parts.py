"""What stands between us and vLLM, without vLLM: the guard, the check of adapters, the settings."""

# pyright: reportPrivateUsage=false

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art_server.backends.base import Sampling
from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.chat.tool_calls.formats import FORMATS
from langchain_art_server.backends.models.images import images_of
from langchain_art_server.backends.models.loading import LoadedModel, load_model, load_outline
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.vllm import adapter_copies, process_guard
from langchain_art_server.backends.vllm.adapter_copies import AdapterCopies
from langchain_art_server.backends.vllm.client import Completion, completion_body, events
from langchain_art_server.backends.vllm.client import _completion as completion_of
from langchain_art_server.backends.vllm.host import VllmHost
from langchain_art_server.backends.vllm.images import SentImage, SentImages, route_lacks
from langchain_art_server.backends.vllm.process import root_causes
from langchain_art_server.backends.vllm.sampler import VllmSampler
from langchain_art_server.config import Settings
from tests.support.tiny_models import KINDS, save_adapter, save_model
from tests.support.vision_models import picture, save_vision_model
from tests.support.vllm_engine import gone

#: A program that starts one child in its own group, and one that leaves it; with shared memory.
FAMILY = """
import subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
nap = [sys.executable, "-c", "import time; time.sleep(600)"]
pids = [subprocess.Popen(nap).pid, subprocess.Popen(nap, start_new_session=True).pid]
memory = SharedMemory(create=True, size=4096)
open(sys.argv[1], "w").write(" ".join([*map(str, pids), memory.name]) + "\\n")
time.sleep({seconds})
sys.exit(7)
"""
#: A program that holds a guard, as the sampler's process does.
HOLDER = """
import subprocess, sys, time
guard = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print(guard.pid, flush=True)
time.sleep(600)
"""

#: What vLLM 0.32 writes when a worker can not be started, without most of the frames.
OUTPUT = """\
(APIServer pid=1) INFO 11-21 12:58:58 [model.py:2152] Using max model len 1024
Traceback (most recent call last):
  File "<string>", line 1, in <module>
    from annotated_doc import Doc
ImportError: cannot import name 'Doc' from 'annotated_doc' (unknown location)
(EngineCore pid=2) INFO 11-21 12:59:15 [multiproc_executor.py:486] all workers exited
(EngineCore pid=2) ERROR 11-21 12:59:15 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-21 12:59:15 [core.py:1510]   File "core.py", line 1482, in run
(EngineCore pid=2) ERROR 11-21 12:59:15 [core.py:1510] Exception: WorkerProc failed.
(EngineCore pid=2) Process EngineCore:
(EngineCore pid=2) Traceback (most recent call last):
(EngineCore pid=2)   File "core.py", line 1482, in run
(EngineCore pid=2) Exception: WorkerProc failed.
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "utils.py", line 1431, in wait_for_engine_startup
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""
#: What pydantic says has several lines.
INVALID = """\
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "arg_utils.py", line 1, in create_model_config
(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error
(APIServer pid=1)   Value error, User-specified max_model_len (999999) is greater
(APIServer pid=1)
(APIServer pid=1) INFO 11-21 12:59:15 [launcher.py:1] Shutting down
"""


def test_the_first_cause_of_an_end_is_told_first_and_whole() -> None:
    assert root_causes(OUTPUT) == [
        "ImportError: cannot import name 'Doc' from 'annotated_doc' (unknown location)",
        "Exception: WorkerProc failed.",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    (one,) = root_causes(INVALID)
    assert one.splitlines() == [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error",
        "  Value error, User-specified max_model_len (999999) is greater",
    ]
    assert root_causes("INFO 11-21 12:59:15 [a.py:1] all is well\n") == []


def family(folder: Path, seconds: float) -> list[str]:
    (folder / "inner").mkdir()
    argv = [sys.executable, "-I", str(process_guard.__file__), str(folder / "inner")]
    return [*argv, sys.executable, "-c", FAMILY.format(seconds=seconds), str(folder / "pids")]


def started(folder: Path) -> tuple[list[int], Path]:
    """The children's process ids, and the shared memory."""
    while not (folder / "pids").exists() or not (folder / "pids").read_text().endswith("\n"):
        time.sleep(0.02)
    *pids, name = (folder / "pids").read_text().split()
    return [int(pid) for pid in pids], Path("/dev/shm", name.strip("/"))


@pytest.mark.parametrize("end", ["the pipe closes", "kill -9 of the holder", "SIGTERM"])
def test_the_guard_ends_the_family_with_its_holder(tmp_path: Path, end: str) -> None:
    argv = family(tmp_path, 600)
    if end == "kill -9 of the holder":
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *argv], stdout=subprocess.PIPE, start_new_session=True
        )
        assert holder.stdout is not None
        guard_pid, program = int(holder.stdout.readline()), int(holder.stdout.readline())
        pids, memory = started(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    else:
        guard = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert guard.stdin is not None and guard.stdout is not None
        guard_pid, program = guard.pid, int(guard.stdout.readline())
        pids, memory = started(tmp_path)
        if end == "SIGTERM":
            guard.terminate()
        else:
            guard.stdin.close()
        assert guard.wait(timeout=60) == 128 + signal.SIGKILL
        guard.stdout.close()
    assert gone([guard_pid, program, *pids])
    assert not (tmp_path / "inner").exists()
    assert not memory.exists()


def test_the_guard_ends_what_the_program_leaves_behind(tmp_path: Path) -> None:
    guard = subprocess.Popen(family(tmp_path, 0), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    pids, memory = started(tmp_path)
    assert guard.wait(timeout=60) == 7
    assert gone(pids)
    assert not memory.exists()


# --- adapters -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "qwen3")


def outline_of(model: Path) -> LoadedModel:
    return load_outline(Settings.model_validate({"model": str(model)}))


@pytest.fixture
def copies(model: Path) -> Any:
    made = AdapterCopies(outline_of(model).model, 4, "bfloat16")
    yield made
    shutil.rmtree(made.folder, ignore_errors=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_holds_what_the_learner_computes_with(
    dtype: str, model: Path, tmp_path: Path
) -> None:
    """On a base in 16 bits the learner's LoRA is the rounded masters (`LoraWeights`)."""
    path = save_adapter(tmp_path / "a", model, 1)
    core = LearnerCore(str(model), dtype=dtype)
    core._hold(path)
    told = {name.replace(".default", ""): p for name, p in core._scorer.model.named_parameters()}
    copies = AdapterCopies(outline_of(model).model, 4, dtype)
    copy, twin = copies.add("a@1", path), copies.add("a@1", path)
    assert copy.vllm_name != twin.vllm_name and copy.folder != twin.folder
    copies.remove(twin)
    assert copy.folder.exists() and not twin.folder.exists()
    copied = load_file(copy.folder / "adapter_model.safetensors")
    assert copy.has_effect and oct(copies.folder.stat().st_mode)[-3:] == "700"
    shutil.rmtree(copies.folder)
    assert copied.keys() == core.parameters.keys()
    assert all(torch.equal(part, told[name]) for name, part in copied.items())
    assert {part.dtype for part in copied.values()} == {getattr(torch, dtype)}


@pytest.mark.parametrize(
    ("options", "value", "problem"),
    [
        ({"r": 16}, None, r"got rank 16, expected at most 8.*max_rank = 16"),
        ({"target_modules": ["q_proj", "lm_head"]}, None, "lm_head, which vLLM does not apply"),
        ({}, float("nan"), "not finite"),
        ({}, 3.4e38, "not finite in bfloat16"),
    ],
)
def test_what_vllm_would_take_in_silence_is_refused(
    copies: AdapterCopies,
    model: Path,
    tmp_path: Path,
    options: dict[str, Any],
    value: float | None,
    problem: str,
) -> None:
    path = save_adapter(tmp_path / "a", model, 1, **options)
    tensors = load_file(path / "adapter_model.safetensors")
    tensors.pop("base_model.model.lm_head.base_layer.weight", None)  # PEFT adds the head itself
    if value is not None:
        next(iter(tensors.values())).view(-1)[0] = value
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=problem):
        copies.add("a@1", path)
    assert not list(copies.folder.iterdir())


def test_a_copy_that_fails_leaves_nothing(
    copies: AdapterCopies, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_source: Path, target: Path) -> None:
        target.write_bytes(b"as far as there was room")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(ConfigError, match="No space left"):
        copies.add("p@1", save_adapter(tmp_path / "a", model, 1))
    assert not [*copies.folder.iterdir()]


async def test_a_start_that_is_refused_leaves_no_folder(copies: AdapterCopies) -> None:
    async def refuse() -> None:
        raise ConfigError("an option that this server sets itself")

    host: Any = object.__new__(VllmHost)
    host._copies, host.process = copies, SimpleNamespace(start=refuse)
    with pytest.raises(ConfigError, match="sets itself"):
        await host.start()
    assert not copies.folder.exists()


def test_copies_go_to_disk_where_shared_memory_has_no_room(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(adapter_copies.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(adapter_copies, "_EXPECTED", 1 << 50)
    assert AdapterCopies(outline_of(model).model, 4, "float32").folder.parent == tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_the_outline_of_a_model_is_the_loaded_model_without_weights(
    tmp_path: Path, kind: str
) -> None:
    settings = Settings.model_validate({"model": str(save_model(tmp_path / kind, kind))})
    outline, whole = load_outline(settings), load_model(settings)
    assert (outline.info, outline.eos) == (whole.info, whole.eos)
    assert all(parameter.is_meta for parameter in outline.model.parameters())


# --- replies -----------------------------------------------------------------------------------


async def test_events_end_at_a_line_feed_and_nowhere_else() -> None:
    said = [{"text": "a\u2028b\x85c\u2029d"}, {"text": "\x0b\x0c\x1c\n\r"}, {"text": "é"}]
    lines = [f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in said]
    whole = "".join([": a comment\n\n", *lines, "data: [DONE]\n\n"]).encode()

    async def cut(size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(whole), size):
            yield whole[at : at + size]

    for size in (1, 7, len(whole)):
        assert [event async for event in events(cut(size))] == said


# --- settings -----------------------------------------------------------------------------------


def test_the_tool_format_is_told_or_read_off_the_template(model: Path) -> None:
    outline = outline_of(model)
    assert ChatTemplate(outline.tokenizer, outline.eos).tools is FORMATS["hermes"]
    told = ChatTemplate(outline.tokenizer, outline.eos, FORMATS["llama"])
    assert told.tools is FORMATS["llama"]
    sampler = {"kind": "vllm", "tool_format": "hermes2"}
    settings = Settings.model_validate({"model": "m", "device": "cpu", "sampler": sampler})
    with pytest.raises(ConfigError, match=r"tool_format: got 'hermes2', expected .*hermes \(Qwen"):
        VllmSampler(settings)


def test_a_completion_with_images_of_vllm_0_31_is_read() -> None:
    """Its tokens are named by texts, as they are without images."""
    two = [{"token": f"token_id:{one}", "logprob": at} for one, at in ((5, -2.0), (7, -1.0))]
    logprobs = {"content": [two[0] | {"top_logprobs": two}]}
    choice = {"token_ids": [5], "logprobs": logprobs, "finish_reason": "length"}
    assert completion_of({"prompt_token_ids": [1, 2]} | choice) == Completion(
        [5], [-2.0], [1, 2], [[(7, -1.0), (5, -2.0)]], "length"
    )


def test_images_are_put_in_their_places(tmp_path: Path) -> None:
    model = save_vision_model(tmp_path / "model", "SmolVLM")
    outline = outline_of(model)
    images = images_of(str(model), outline.model, outline.tokenizer, SentImages)
    assert isinstance(images, SentImages)
    red, blue = (images.read(name, picture((one, 0, 9))) for name, one in (("r", 255), ("b", 1)))
    assert isinstance(red, SentImage) and isinstance(blue, SentImage)
    seen, mark = {"r": red, "b": blue}, images.mark
    assert len(red.whole) > len(red.ids)
    body = completion_body("m", [], Sampling(), max_tokens=1, eos=[], tenant="t")
    made = images.body(body | {"prompt": [5, *blue.whole, *red.whole, 6, *red.whole]}, seen, "t")
    assert made["token_ids"] == [5, mark, mark, 6, mark]
    names = [part["uuid"] for part in made["content_parts"]]
    assert names == ["t/b", "t/r", "t/r"]
    assert images.body(body | {"prompt": red.whole}, seen)["content_parts"][0]["uuid"] == "/r"
    assert images.written([5, *red.ids]) == [5] + [images.token] * len(red.ids)
    with pytest.raises(InvalidRequest, match="an earlier reply in which '<image>' was sampled"):
        images.body(body | {"prompt": [mark, *red.whole]}, seen)


def test_a_model_that_reads_videos_is_shown_no_images(tmp_path: Path) -> None:
    model = save_vision_model(tmp_path / "model", "Qwen2.5-VL")
    outline = outline_of(model)
    why = images_of(str(model), outline.model, outline.tokenizer, SentImages)
    assert why == "vLLM resizes them unlike the learner where a model reads videos, too"


def test_a_vllm_without_the_route_takes_no_images(tmp_path: Path) -> None:
    python = tmp_path / "python"
    for there in (True, False):
        python.write_text(f"#!/bin/sh\necho {there}\n")
        python.chmod(0o755)
        assert ("--enable-scale-out" in route_lacks(python)) is not there
