"""Each vLLM of several has its own GPUs and log."""

from math import prod
from typing import Any

import pytest

from langchain_art.errors import ConfigError
from langchain_art_server.backends.vllm.sampler import VllmSampler, parallel_sizes
from langchain_art_server.config import Settings, VllmSettings, load_settings


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
