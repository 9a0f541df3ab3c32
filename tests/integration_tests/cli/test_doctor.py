"""`langchain-art doctor`: what it looks at, and what it says of it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from langchain_art.cli.main import app
from langchain_art.diagnostics import doctor
from langchain_art.diagnostics.memory_estimate import Shape, idle_learner_bytes, learner_bytes
from langchain_art.errors import ConfigError
from tests.support.live_server import BASE_MODEL, free_port

KEY = "a-key-of-at-least-sixteen-characters"


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
    driver(monkeypatch, tmp_path, "NVIDIA H200, 143771, 143200, 570.86.15")
    report = doctor.examine(port=free_port())
    found = {finding.name: finding for finding in report.findings}
    assert found["GPU"].ok and "driver 570.86.15" in found["GPU"].found
    assert found["torch"].ok is False and "CUDA build" in found["torch"].advice
    assert not report.healthy
    assert report.device == "NVIDIA H200" and report.memory_bytes == 143200 << 20
    fits = {fit.model: fit.way for fit in report.fits}
    assert (fits["Qwen3-8B"], fits["Qwen3-32B"]) == ("beside", "apart")
    driver(monkeypatch, tmp_path, "NVIDIA H200, 143771, 9000, 570.86.15")
    assert look()["GPU"].ok is False


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


def test_what_does_not_fit_is_refused_and_the_longest_row_says_how_far_off() -> None:
    shape = Shape(36, 4096, 12288, 4096, 1024, 151936)
    sizes = {"context": 8192, "calls": 16, "rank": 16}
    small, large = (
        doctor.fit("m", shape, memory, "bfloat16", 1.0, **sizes) for memory in (40 << 30, 120 << 30)
    )
    assert (small.way, small.devices, small.longest_row) == (None, 0, 0)
    assert (large.way, large.devices) == ("beside", 1) and large.longest_row > 8192
    many = doctor.fit("m", shape, 120 << 30, "bfloat16", 1.0, **sizes | {"calls": 900})
    assert many.way is None


#: A model whose learner needs more memory than its sampler, and one of which it is the other way.
LONG, BROAD = {"context": 32768, "calls": 1}, {"context": 1024, "calls": 64}


@pytest.mark.parametrize("sizes", [LONG, BROAD])
def test_each_way_begins_where_its_memory_is_there(sizes: dict[str, int]) -> None:
    shape = Shape(36, 4096, 12288, 4096, 1024, 151936)
    dtype, program = "bfloat16", doctor.PROGRAM

    def fit(memory: int, *, gpu: bool = True) -> doctor.Fit:
        return doctor.fit("m", shape, memory, dtype, 1.0, rank=16, gpu=gpu, **sizes)

    whole = fit(1 << 50)
    sampler, learner = whole.sampler_bytes, whole.learner_bytes
    row = {"checkpointed": True, "parts": 2}
    least = {
        "beside": sampler + learner + 2 * program,
        "in turns": max(sampler + idle_learner_bytes(shape, 16, dtype), learner) + 2 * program,
        "apart": max(sampler, learner) + program,
        "in parts": max(sampler, learner_bytes(shape, sizes["context"], 16, dtype, **row))
        + program,
    }
    ways = [way for way in least if fit(least[way]).way == way]
    assert ways == (list(least) if sizes is LONG else ["beside", "in turns", "apart"])
    devices = {"beside": 1, "in turns": 1, "apart": 2, "in parts": 3}
    for way in ways:
        assert fit(least[way]).devices == devices[way]
        assert fit(least[way] - 1).way != way or way == "in parts"
        assert fit(least[way]).longest_row >= sizes["context"] - 1
        assert fit(least[way], gpu=False).way == ("beside" if way == "beside" else None)


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
        (1, 110000, False, "two GPUs"),
        (2, 110000, True, "two GPUs"),
        (2, 81000, False, "on 3 GPUs, the learner's base in parts on 2 of them"),
        (3, 81000, True, "ranks = 2 and shard = true"),
    ):
        driver(monkeypatch, tmp_path, *[f"Some GPU, {size}, {size}, 570.86.15"] * cards)
        found = look(model=str(tmp_path), context=32768, calls=1)["memory"]
        assert found.ok is ok and words in found.advice, found
    assert found.found.endswith("free on each GPU")


def test_the_command_ends_with_what_it_found() -> None:
    run = CliRunner().invoke
    port = ["--port", str(free_port())]
    well = run(app, ["doctor", str(BASE_MODEL), "--context", "512", "--json", *port])
    assert well.exit_code == 0, well.output
    report = json.loads(well.stdout)
    assert report["healthy"] and report["fits"][0]["way"] == "beside"
    ill = run(app, ["doctor", "--host", "0.0.0.0", *port])
    assert ill.exit_code == 1
    assert "ART_API_KEY" in ill.output and "Qwen3-8B" in ill.output
    alone = run(app, ["doctor", "--canary"])
    assert isinstance(alone.exception, ConfigError)
