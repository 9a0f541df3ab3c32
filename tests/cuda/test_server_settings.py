"""The settings that the doctor proposes, against a model of what vLLM and the learner take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from langchain_art.diagnostics import doctor
from langchain_art.diagnostics.memory_estimate import Shape, idle_learner_bytes, learner_bytes
from langchain_art_server.config import PeftSettings, Settings, VllmSettings, load_settings

GB = 10**9
#: Of the models' config.json: layers, hidden size, MLP, heads, heads of keys, their width, tokens,
#: tied embeddings; and published weights in billions.
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    f"Qwen/Qwen3-{name}": (
        {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": name == "4B",
        },
        billions,
    )
    for name, layers, hidden, mlp, heads, billions in (
        ("4B", 36, 2560, 9728, 32, 4.02),
        ("8B", 36, 4096, 12288, 32, 8.19),
        ("14B", 40, 5120, 17408, 40, 14.77),
        ("32B", 64, 5120, 25600, 64, 32.76),
    )
}
#: Gigabytes of a GPU, and how many.
MACHINES = [(24, 1), (48, 1), (80, 1), (141, 1), (24, 2), (80, 2), (80, 8)]
#: What cannot be served and trained there without 4 bits: two copies of the weights, or vLLM's one.
TOO_SMALL = {
    ("Qwen/Qwen3-8B", 24, 1),
    ("Qwen/Qwen3-14B", 24, 1),
    ("Qwen/Qwen3-14B", 24, 2),
    ("Qwen/Qwen3-14B", 48, 1),
    ("Qwen/Qwen3-32B", 24, 1),
    ("Qwen/Qwen3-32B", 24, 2),
    ("Qwen/Qwen3-32B", 48, 1),
    ("Qwen/Qwen3-32B", 80, 1),
}
#: What vLLM takes beside weights and cache: CUDA context, graphs, activations of a batch.
VLLM_PROGRAM = 4.0 * GB
#: What of it stays while it sleeps.
ASLEEP = 2.0 * GB


def examine(
    model: str, gigabytes: int, cards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> doctor.DoctorReport:
    shape = Shape.of_config(MODELS[model][0])
    card = {"name": "a GPU", "total": gigabytes << 30, "free": int((gigabytes << 30) * 0.985)}
    monkeypatch.setattr(doctor, "gpus", lambda: [card | {"driver": "580.65.06"}] * cards)
    monkeypatch.setattr(doctor, "read_shape", lambda _model: shape)
    return doctor.examine(model, data_dir=tmp_path)


def check_start(settings: Settings, model: str, total: int, free: int, cards: int) -> None:
    """vLLM's start, a step of the learner and vLLM's wake, in bytes."""
    config, billions = MODELS[model]
    shape = Shape.of_config(config)
    assert isinstance(settings.sampler, VllmSettings)
    assert isinstance(settings.learner, PeftSettings)
    length = settings.max_model_len
    assert length is not None
    share = settings.sampler.gpu_memory * total
    assert free >= share, "Free memory on device is less than desired GPU memory utilization"
    token = 2 * 2 * config["num_hidden_layers"] * 8 * 128
    cache = share - billions * 2 * GB - VLLM_PROGRAM
    assert cache >= token * length, f"the cache holds {cache / token:.0f} of {length} tokens"
    shards = settings.learner.ranks
    idle = idle_learner_bytes(shape, settings.lora.rank, "bfloat16", shards) + doctor.PROCESS_BYTES
    step = doctor.PROCESS_BYTES + learner_bytes(
        shape, length, settings.lora.rank, "bfloat16", checkpointed=True, shards=shards
    )
    if cards > 1:
        replicas = settings.sampler.replicas
        assert settings.device == f"cuda:{replicas}" and not settings.take_turns
        assert replicas + settings.learner.ranks == cards, "a GPU is idle"
        assert step <= free
    elif settings.take_turns:
        assert idle + share <= free, "vLLM does not wake"
        assert step + ASLEEP <= free
    else:
        assert step + share <= free


def test_the_published_sizes_are_those_of_the_table() -> None:
    for config, billions in MODELS.values():
        assert Shape.of_config(config).parameters / GB == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(("gigabytes", "cards"), MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_what_the_doctor_proposes_starts(
    model: str, gigabytes: int, cards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = examine(model, gigabytes, cards, tmp_path, monkeypatch)
    finding = next(one for one in report.findings if one.name == "memory")
    assert bool(report.settings) == ((model, gigabytes, cards) not in TOO_SMALL), report.settings
    if not report.settings:
        assert finding.ok is False and finding.advice
        return
    path = tmp_path / "server.toml"
    path.write_text(report.settings)
    settings = load_settings(path)
    assert settings.model == model
    card = report.memory_bytes
    check_start(settings, model, gigabytes << 30, card, cards)
    if finding.ok:
        assert settings.max_model_len == report.context


def test_the_smallest_card_gets_a_shorter_context_or_fewer_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = examine("Qwen/Qwen3-4B", 24, 1, tmp_path, monkeypatch)
    assert "take_turns = true" in report.settings
    json.loads(report.model_dump_json())
