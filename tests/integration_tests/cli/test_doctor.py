"""`langchain-art doctor`: what it looks at, and what it says of it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from typer.testing import CliRunner

from langchain_art.cli.main import app
from langchain_art.diagnostics import doctor
from langchain_art.errors import ConfigError
from langchain_art.hardware import placement
from langchain_art.hardware.memory_estimate import Shape
from langchain_art.wire.api_keys import new_api_key
from tests.support.live_server import BASE_MODEL, free_port

KEY = new_api_key()


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ART_API_KEY", raising=False)


def driver(monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str) -> None:
    """A machine with these GPUs, as far as the driver's tool tells."""
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def look(**options: Any) -> dict[str, doctor.Finding]:
    report = doctor.examine(**{"port": free_port()} | options)
    return {finding.name: finding for finding in report.findings}


def test_this_machine_is_well_and_its_own_model_fits() -> None:
    found = look(model=str(BASE_MODEL), context=512)
    assert all(finding.ok is not False for finding in found.values()), found
    assert found["GPU"].found == "none" and found["GPU"].ok is None
    assert "torch 2." in found["packages"].found
    assert found["torch"].found == "built for CPUs, sees 0 GPUs"


def test_a_gpu_that_torch_does_not_see_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver(monkeypatch, tmp_path, "NVIDIA H200, 143771, 143200, 580.65.06")
    report = doctor.examine(port=free_port())
    found = {finding.name: finding for finding in report.findings}
    assert found["GPU"].ok and "driver 580.65.06" in found["GPU"].found
    assert found["torch"].ok is False and "CUDA build" in found["torch"].advice
    assert not report.healthy
    assert report.device == "NVIDIA H200" and report.memory_bytes == 143200 << 20
    fits = {fit.model: fit.placement for fit in report.fits}
    assert (fits["Qwen3-8B"], fits["Qwen3-32B"]) == ("together", "separate")
    driver(monkeypatch, tmp_path, "NVIDIA H200, 143771, 9000, 580.65.06")
    assert look()["GPU"].ok is False


def test_a_driver_too_old_for_cuda_13_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for version, ok in (("570.86.15", False), ("580.65.06", True), ("595.12", True)):
        driver(monkeypatch, tmp_path, f"NVIDIA H200, 143771, 143200, {version}")
        found = look()["GPU"]
        assert found.ok is ok and f"driver {version}" in found.found
        assert ("driver 580 or newer" in found.advice) is not ok


def test_a_cuda_build_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = CompletedProcess([], 0, stdout='{"cuda": "13.0", "devices": 0}\n', stderr="")
    monkeypatch.setattr(doctor, "_ask_torch", lambda: said)
    monkeypatch.setattr(doctor, "gpus", list)
    found = look()["torch"]
    assert found.found == "built for CUDA 13.0, and there is no GPU" and found.ok is None
    assert "download.pytorch.org/whl/cpu" in found.advice and "torch==2." in found.advice
    assert "+" not in found.advice


def test_port_key_and_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert look(port=taken.getsockname()[1])["port"].ok is False
    assert look()["key"].ok
    assert look(host="0.0.0.0")["key"].ok is False
    monkeypatch.setenv("ART_API_KEY", KEY)
    assert look(host="0.0.0.0")["key"].ok
    monkeypatch.setenv("ART_API_KEY", "short")
    assert look()["key"].ok is False
    assert look(data_dir=tmp_path / "not" / "yet")["disk"].found.endswith(f"at {tmp_path}")
    monkeypatch.setattr(doctor, "LEAST_DISK", 1 << 60)
    assert look()["disk"].ok is False


def test_a_model_is_found_in_the_hubs_cache_or_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="download it first"):
        doctor.read_shape("some/model")
    folder = tmp_path / "hub/models--some--model/snapshots/0f3a"
    folder.mkdir(parents=True)
    config = json.loads((BASE_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    assert doctor.read_shape("some/model") == doctor.read_shape(str(BASE_MODEL))
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="hidden_size"):
        doctor.read_shape("some/model")


#: A model small enough to compute its memory by hand:
#: - a layer has 2 * 100 * (100 + 50) + 3 * 100 * 300 = 120,000 weights; eight of them and two
#:   embeddings of 20,000 * 100 are 4,960,000;
#: - an adapter of rank 4 has 8 * 4 * (2 * 200 + 2 * 150 + 3 * 400) = 60,800 weights of 16 bytes,
#:   of 18 on a bfloat16 base;
#: - in bfloat16 a sampler needs 9,920,000 bytes and 2 * 8 * 50 * 2 for each token, a learner
#:   11,014,400 between steps;
#: - in a step of 1,000 tokens the learner needs 201,326,592 more for logits, and for each token
#:   12 * 100 + 8 * 300 + 8 * 100 + 7 * 50 + 7 * 4 * 2 of one layer and 8 * (100 + 2 * 50) * 2
#:   of the layers' inputs, keys and values, together 8,006.
HAND = Shape(8, 100, 300, 100, 50, 20_000)


@pytest.fixture
def small_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's program takes no more than others: the model above is smaller than it."""
    monkeypatch.setattr(placement, "VLLM_BYTES", placement.PROCESS_BYTES)


def hand_fit(memory: int, calls: int = 10, *, gpu: bool = True) -> doctor.MemoryFit:
    return placement.fit("m", HAND, memory, gpu=gpu, context=1000, calls=calls, rank=4)


def test_needs_are_those_computed_by_hand() -> None:
    on_gpu, on_cpu = hand_fit(1 << 40), hand_fit(1 << 40, gpu=False)
    assert (on_gpu.parameters, on_gpu.dtype) == (4_960_000, "bfloat16")
    assert (on_gpu.sampler_bytes, on_gpu.learner_bytes) == (25_920_000, 220_346_992)
    assert on_cpu.dtype == "float32"
    # 19,840,000 + 32,000,000; and 20,812,800 + 2.2 * 1,000 * 14,712 + 201,326,592
    assert (on_cpu.sampler_bytes, on_cpu.learner_bytes) == (51_840_000, 254_505_792)


@pytest.mark.parametrize(
    ("memory", "calls", "placement", "devices"),
    [
        (3_246_266_992, 10, "together", 1),  # 3 GB for two processes, 25,920,000, 220,346,992
        (3_246_266_991, 10, "in turns", 1),
        (3_220_346_992, 10, "in turns", 1),  # the learner and two processes
        (3_220_346_991, 10, "separate", 2),
        (1_720_346_992, 10, "separate", 2),  # the learner and its process
        (1_720_346_991, 10, "sharded", 3),
        (1_719_866_992, 10, "sharded", 3),  # two of eight layers less: 480,000 bytes
        (1_719_866_991, 10, "sharded", 4),
        (1_719_146_992, 10, "sharded", 9),  # five of eight layers less
        (1_719_146_991, 10, None, 0),
        (3_550_266_992, 200, "together", 1),  # a sampler of 329,920,000 bytes
        (3_550_266_991, 200, "in turns", 1),
        (3_340_934_400, 200, "in turns", 1),  # sampler, idle learner, two processes
        (3_340_934_399, 200, "separate", 2),
        (1_829_920_000, 200, "separate", 2),
        (1_829_919_999, 200, None, 0),  # the sampler is not sharded
    ],
)
@pytest.mark.usefixtures("small_vllm")
def test_each_placement_begins_where_its_memory_is_there(
    memory: int, calls: int, placement: str | None, devices: int
) -> None:
    found = hand_fit(memory, calls)
    assert (found.placement, found.devices) == (placement, devices)
    assert (found.longest_row >= 999) == (placement is not None)


@pytest.mark.parametrize(
    ("memory", "rows"),
    [
        (3_246_266_992, 1000),
        (3_246_266_992 + 8_006 * 500, 1500),
        (1_720_346_992, 1000),
        (1_719_866_992, 1000),
        (1_000_000_000, 0),
    ],
)
@pytest.mark.usefixtures("small_vllm")
def test_the_longest_row_takes_what_is_left(memory: int, rows: int) -> None:
    assert hand_fit(memory).longest_row == rows


def test_a_cpu_holds_both_or_nothing() -> None:
    assert hand_fit(3_306_345_792, gpu=False).placement == "together"
    nothing = hand_fit(3_306_345_791, gpu=False)
    assert (nothing.placement, nothing.devices, nothing.longest_row) == (None, 0, 0)


def test_as_many_gpus_as_it_takes_or_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for cards, size, ok, words in (
        (1, 110000, True, 'quantization = "nf4"'),
        (2, 110000, True, 'device = "cuda:1" and [sampler] replicas = 1'),
        (4, 110000, True, 'device = "cuda:3" and [sampler] replicas = 3'),
        (2, 81000, False, "on 3 GPUs, the learner's base sharded over the last 2"),
        (3, 81000, True, "ranks = 2 and shard = true"),
        (
            5,
            81000,
            True,
            'device = "cuda:3", [sampler] replicas = 3, and under [learner] ranks = 2',
        ),
    ):
        driver(monkeypatch, tmp_path, *[f"Some GPU, {size}, {size}, 580.65.06"] * cards)
        found = look(model=str(tmp_path), context=32768, calls=1)["memory"]
        assert found.ok is ok and words in found.advice, found
    assert found.found.endswith("free on each GPU")


def test_the_command_ends_with_what_it_found() -> None:
    run = CliRunner().invoke
    port = ["--port", str(free_port())]
    well = run(app, ["doctor", str(BASE_MODEL), "--context", "512", "--json", *port])
    assert well.exit_code == 0, well.output
    report = json.loads(well.stdout)
    assert report["healthy"] and report["fits"][0]["placement"] == "together"
    ill = run(app, ["doctor", "--host", "0.0.0.0", *port])
    assert ill.exit_code == 1
    assert "ART_API_KEY" in ill.output and "Qwen3-8B" in ill.output
    alone = run(app, ["doctor", "--canary"])
    assert isinstance(alone.exception, ConfigError)
