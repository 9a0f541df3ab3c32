"""`langchain-art doctor`: what it looks at, and what it says of it."""

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
from langchain_art.gpu_memory import MemoryNeeds, Shape
from langchain_art.wire.api_keys import new_api_key
from tests.support.live_server import BASE_MODEL, free_port

KEY = new_api_key()


def driver(monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def look(**options: Any) -> dict[str, doctor.Finding]:
    report = doctor.examine(**{"port": free_port()} | options)
    return {finding.name: finding for finding in report.findings}


def test_a_gpu_that_torch_does_not_see_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver(monkeypatch, tmp_path, "NVIDIA H200, 143771, 143200, 580.65.06, 9.0")
    report = doctor.examine(port=free_port())
    found = {finding.name: finding for finding in report.findings}
    assert found["GPU"].ok and "driver 580.65.06" in found["GPU"].found
    assert found["torch"].ok is False and "CUDA build" in found["torch"].advice
    assert not report.healthy
    assert report.device == "NVIDIA H200" and report.memory_bytes == 143200 << 20
    fits = {fit.model: fit.placement for fit in report.fits}
    assert (fits["Qwen3-8B"], fits["Qwen3-32B"]) == ("together", "in turns")
    driver(monkeypatch, tmp_path, "NVIDIA H200, 143771, 9000, 580.65.06, 9.0")
    assert look()["GPU"].ok is False
    driver(monkeypatch, tmp_path, "NVIDIA H200, 143771, 143200, 570.86.15, 9.0")
    assert look()["GPU"].ok is False and "driver 580 or newer" in look()["GPU"].advice


def test_a_card_without_bfloat16_computes_in_float16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for card, ok, dtype, words in (
        ("Tesla T4, 15360, 15100, 580.65.06, 7.5", True, "float16", ""),
        ("Tesla V100, 16384, 16000, 580.65.06, 7.0", False, "float16", "built for CUDA 12"),
        ("NVIDIA A10G, 23028, 22500, 580.65.06, 8.6", True, "bfloat16", ""),
    ):
        driver(monkeypatch, tmp_path, card)
        report = doctor.examine(port=free_port())
        (found,) = [finding for finding in report.findings if finding.name == "GPU"]
        assert found.ok is ok and words in found.advice
        told = "no bfloat16, so models are served and trained in float16" in found.found
        assert told is (dtype == "float16")
        assert {fit.dtype for fit in report.fits} == {dtype}
        assert {fit.model: fit.placement for fit in report.fits}["Qwen2.5-0.5B"] == "together"


def test_a_cuda_build_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = CompletedProcess([], 0, stdout='{"cuda": "13.0", "devices": 0}\n', stderr="")
    monkeypatch.setattr(doctor, "_ask_torch", lambda: said)
    monkeypatch.setattr(doctor.gpu_memory, "gpus", list)
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
#: - in 4 bits the layers take 960,000 * 0.5625 bytes, and a matrix of 100 * 300 is computed:
#:   1,320,000 bytes less than in bfloat16;
#: - an adapter of rank 4 has 8 * 4 * (2 * 200 + 2 * 150 + 3 * 400) = 60,800 weights of 16 bytes,
#:   of 18 on a bfloat16 base;
#: - in bfloat16 a sampler needs 9,920,000 bytes and 2 * 8 * 50 * 2 for each token, a learner
#:   11,014,400 between steps;
#: - in a step of 1,000 tokens the learner needs 201,326,592 more for logits, and for each token
#:   8 * 100 + 8 * 300 + 6 * 100 + 6 * 50 + 7 * 4 * 2 of one layer and 8 * (100 + 2 * 50) * 2
#:   of the layers' inputs, keys and values, together 7,356.
HAND = Shape(8, 100, 300, 100, 50, 20_000)


def hand_fit(memory: int, cards: int) -> doctor.MemoryFit:
    return doctor.fit("m", HAND, cards, memory, memory, context=1000, rank=4)


def test_needs_are_those_computed_by_hand() -> None:
    on_gpu, on_cpu = hand_fit(1 << 40, 1), hand_fit(1 << 40, 0)
    assert (on_gpu.parameters, on_gpu.dtype) == (4_960_000, "bfloat16")
    assert (on_gpu.sampler_bytes, on_gpu.learner_bytes) == (11_520_000, 219_696_992)
    assert on_cpu.dtype == "float32"
    # 19,840,000 + 3,200,000, and copies of all weights but one embedding, 4 * 2,960,000; for the
    # learner 20,812,800 + 2.2 * 1,000 * 14,712 + 201,326,592
    assert (on_cpu.sampler_bytes, on_cpu.learner_bytes) == (34_880_000, 254_505_792)
    # Of eight layers of 240,000 bytes, a quarter and the two that are gathered.
    assert MemoryNeeds(HAND, "bfloat16", 4, shards=4).idle == 11_014_400 - 4 * 240_000
    assert MemoryNeeds(HAND, "bfloat16", 4, four_bits=True).idle == 11_014_400 - 1_320_000
    assert MemoryNeeds(HAND, "bfloat16", 4, offload=True).token() == 7_356 - 8 * 100 * 2


def test_each_placement_begins_where_its_memory_is_there() -> None:
    for memory, cards, placement, four_bits in (
        # vLLM's 4,011,520,000 bytes and the learner's 1,719,696,992, with their programs
        (5_731_216_992, 1, "together", False),
        (5_731_216_991, 1, "in turns", False),
        (5_719_696_992, 1, "in turns", False),  # a step, and a vLLM that sleeps
        (5_719_696_991, 1, "in turns", True),
        (5_718_376_992, 1, "in turns", True),
        (5_718_376_991, 1, None, False),
        (5_719_696_991, 2, "separate", False),
        (4_457_244_445, 2, "separate", False),  # nine tenths are vLLM's
        (4_457_244_444, 2, "separate", True),
        (4_455_777_777, 2, None, False),
        (3_289_385_792, 0, "together", False),
        (3_289_385_791, 0, None, False),
    ):
        found = hand_fit(memory, cards)
        assert (found.placement, found.quantization == "nf4") == (placement, four_bits), memory


def test_the_advice_names_the_settings_that_a_placement_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600}
    config |= {"num_attention_heads": 64, "head_dim": 128, "num_key_value_heads": 8}
    config |= {"vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for cards, size, ok, words in (
        (1, 110000, True, 'quantization = "nf4"'),
        (1, 24000, False, "larger or several GPUs"),
        (1, 160000, True, "take_turns = true"),
        (2, 110000, True, 'device = "cuda:1"'),
    ):
        driver(monkeypatch, tmp_path, *[f"Some GPU, {size}, {size}, 580.65.06, 9.0"] * cards)
        found = look(model=str(tmp_path), context=32768)["memory"]
        assert found.ok is ok and words in found.advice, found
    assert found.found.endswith("free on each GPU")


def test_the_command_ends_with_what_it_found() -> None:
    run = CliRunner().invoke
    port = ["--port", str(free_port())]
    well = run(app, ["doctor", str(BASE_MODEL), "--context", "512", "--json", *port])
    assert well.exit_code == 0, well.output
    report = json.loads(well.stdout)
    found = {one["name"]: one for one in report["findings"]}
    assert found["GPU"]["found"] == "none" and found["GPU"]["ok"] is None
    assert "torch 2." in found["packages"]["found"]
    assert found["torch"]["found"] == "built for CPUs, sees 0 GPUs"
    assert report["healthy"] and report["fits"][0]["placement"] == "together"
    ill = run(app, ["doctor", "--host", "0.0.0.0", *port])
    assert ill.exit_code == 1
    assert "ART_API_KEY" in ill.output and "Qwen3-8B" in ill.output
    alone = run(app, ["doctor", "--canary"])
    assert isinstance(alone.exception, ConfigError)
