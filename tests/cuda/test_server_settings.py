"""The share and the context that a server takes, against a model of what both engines take."""

import logging
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from langchain_art.errors import ConfigError
from langchain_art.gpu_memory import PROCESS_BYTES, MemoryNeeds, Shape
from langchain_art_server.backends.base import ModelInfo
from langchain_art_server.backends.models.loading import LoadedModel
from langchain_art_server.backends.vllm import process
from langchain_art_server.backends.vllm.process import VllmProcess
from langchain_art_server.backends.vllm.sampler import VllmSampler, parallel_sizes
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
#: What vLLM takes beside weights and cache: CUDA context, graphs, activations of a batch.
VLLM_PROGRAM = 4.0 * GB
#: What of it stays while it sleeps.
ASLEEP = 2.0 * GB


def check_start(
    settings: Settings, model: str, total: int, free: int, cards: int, length: int | None
) -> None:
    """vLLM's start, a step of the learner and vLLM's wake, in bytes."""
    config, billions = MODELS[model]
    shape = Shape.of_config(config)
    assert shape.parameters / GB == pytest.approx(billions, rel=0.01)
    assert isinstance(settings.sampler, VllmSettings)
    assert isinstance(settings.learner, PeftSettings)
    assert length is not None and settings.sampler.gpu_memory is not None
    share = settings.sampler.gpu_memory * total
    assert free >= share, "Free memory on device is less than desired GPU memory utilization"
    token = 2 * 2 * config["num_hidden_layers"] * 8 * 128
    weights = billions * 2 * GB
    cache = share - weights - VLLM_PROGRAM
    assert cache >= token * length, f"the cache holds {cache / token:.0f} of {length} tokens"
    needs = MemoryNeeds(shape, "bfloat16", settings.lora.rank, settings.learner.ranks)
    idle, step = PROCESS_BYTES + needs.idle, PROCESS_BYTES + needs.step(length)
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


#: The smallest card, in gigabytes, on which sampler and learner fit together or in turns, and on
#: which each fits alone.
SMALLEST = {"4B": (24, 24), "8B": (48, 24), "14B": (80, 48), "32B": (141, 80)}


def filled_in(model: str, cards: list[Any], **options: Any) -> tuple[Settings, int]:
    """What a server on vLLM takes on itself where `options` leave it open."""
    config, billions = MODELS[model]
    settings = Settings.model_validate({"model": model, "sampler": {"kind": "vllm"}} | options)
    length = settings.max_model_len or 32768
    info = ModelInfo(model, model, int(billions * GB), "cuda", "bfloat16", length, 151936, 16)
    holder: Any = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: config))
    settings, outline = process.fill_in(settings, LoadedModel(holder, None, set(), info), cards)
    return settings, outline.info.max_model_len


@pytest.mark.parametrize("options", [{}, {"take_turns": True}, {"device": "cuda:1"}])
@pytest.mark.parametrize("gigabytes", [24, 48, 80, 141])
@pytest.mark.parametrize("model", MODELS)
def test_a_server_that_is_told_nothing_takes_a_share_and_a_context_that_fit(
    model: str,
    gigabytes: int,
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cards = [{"total": gigabytes << 30, "free": int((gigabytes << 30) * 0.985)}] * 2
    fits = gigabytes >= SMALLEST[model.removeprefix("Qwen/Qwen3-")]["device" in options]
    with caplog.at_level(logging.WARNING):
        settings, context = filled_in(model, cards, **options)
    if fits:
        used = 2 if "device" in options else 1
        check_start(settings, model, gigabytes << 30, cards[0]["free"], used, context)
        assert "do not fit" not in caplog.text
    else:
        assert f"`langchain-art doctor {model}` says what each needs" in caplog.text


def test_what_the_settings_say_stays_and_several_cards_and_none_are_filled_in() -> None:
    model, cards = "Qwen/Qwen3-8B", [{"total": 80 << 30, "free": 79 << 30}] * 3
    said: dict[str, Any] = {"kind": "vllm", "gpu_memory": 0.27}
    settings, context = filled_in(model, cards, sampler=said, max_model_len=4096)
    assert (settings.sampler, context) == (VllmSettings(gpu_memory=0.27), 4096)
    _, context = filled_in(model, cards, sampler=said)
    assert context == 16384  # the share holds the weights, 4 GB of program and so many tokens
    # Without the driver's tool the memory is unknown, and vLLM shortens the context.
    settings, context = filled_in(model, [])
    assert (settings.sampler, context) == (VllmSettings(gpu_memory=process.UNKNOWN_SHARE), 32768)

    def share(**options: Any) -> Any:
        sampler = filled_in(model, cards, **options)[0].sampler
        assert isinstance(sampler, VllmSettings)
        return sampler.gpu_memory

    # One of several vLLMs, or of a vLLM's cards, has the learner beside it.
    two, spread = {"kind": "vllm", "replicas": 2}, VllmSettings(args=("-tp", "2")).model_dump()
    assert share(sampler=two, device="cuda:2") == 0.9
    assert filled_in(model, cards, sampler=spread)[1] == 32768
    assert share(sampler=two, device="cuda:1") == share(sampler=spread) == share()


async def test_calls_are_as_long_as_vllm_says_unless_the_settings_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its cache may hold fewer tokens than the estimate."""

    def answer(_request: httpx.Request) -> httpx.Response:
        served = [{"id": "p@1/1", "max_model_len": 1}, {"id": "base", "max_model_len": 5000}]
        return httpx.Response(200, json={"data": served})

    info = ModelInfo("m", "m", 1, "cuda", "bfloat16", 8192, 151936, 16)
    said = Settings(model="m", sampler=VllmSettings(gpu_memory=0.5), max_model_len=8192)
    for settings, expected in (
        (said, 8192),
        (said.model_copy(update={"max_model_len": None}), 5000),
    ):
        process = VllmProcess(settings, info, tmp_path, ["q_proj"], 16)
        process.client._http = httpx.AsyncClient(
            base_url="http://vllm", transport=httpx.MockTransport(answer)
        )
        with caplog.at_level(logging.WARNING):
            assert (await process.fitted(info)).max_model_len == expected
    assert "up to 5000 tokens" in caplog.text


def visible(settings: Settings) -> list[str | None]:
    assert isinstance(settings.sampler, VllmSettings)
    samplers = [VllmSampler(settings, number) for number in range(settings.sampler.replicas)]
    programs: list[Any] = [sampler._program for sampler in samplers]
    assert [one._config["replica"] for one in programs] == list(range(len(programs)))
    return [one._env.get("CUDA_VISIBLE_DEVICES") for one in programs]


def settings_of(replicas: int, *args: str, **top: Any) -> Settings:
    return Settings(model="m", sampler=VllmSettings(replicas=replicas, args=args), **top)


def test_each_has_the_gpus_after_those_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible(settings_of(3)) == ["0", "1", "2"]
    assert visible(settings_of(2, "--tensor-parallel-size=2")) == ["0,1", "2,3"]
    assert visible(settings_of(2, device="cpu")) == [None, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5e,7")
    assert visible(settings_of(2, device="cuda:2")) == ["3", "GPU-5e"]
    with pytest.raises(
        ConfigError, match=r"got CUDA_VISIBLE_DEVICES=3,GPU-5e,7, expected at l.* 4"
    ):
        visible(settings_of(2, "-tp", "2"))


def test_the_options_that_take_more_than_one_gpu_are_read() -> None:
    assert prod(parallel_sizes(())) == 1
    assert prod(parallel_sizes(("--tensor_parallel_size", "2", "--enforce-eager", "-pp=3"))) == 6
    assert prod(parallel_sizes(("--data-parallel-size=2", "--tensor-parallel-size=4"))) == 8
    with pytest.raises(ConfigError, match=r"\[sampler\] args: .*invalid int value: 'two'"):
        parallel_sizes(("--tensor-parallel-size=two",))


def test_the_embedded_sampler_has_none() -> None:
    with pytest.raises(
        ConfigError, match="got replicas=2 with kind='transformers', expected it wi"
    ):
        load_settings(model="m", sampler={"replicas": 2})
