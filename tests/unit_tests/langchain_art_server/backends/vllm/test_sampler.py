"""vLLM's settings that its module reads in the gateway, before any process is started."""

from pathlib import Path

import pytest

from langchain_art.errors import ConfigError
from langchain_art_server.backends.chat.tool_calls.formats import FORMATS
from langchain_art_server.backends.vllm.sampler import VllmSampler
from langchain_art_server.config import Settings


def told(folder: Path, tool_format: str) -> Settings:
    sampler = {"kind": "vllm", "tool_format": tool_format}
    return Settings(model="m", data_dir=folder, device="cpu", sampler=sampler)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_the_registry_can_be_named(name: str, tmp_path: Path) -> None:
    VllmSampler(told(tmp_path, name))


@pytest.mark.parametrize("name", ["hermes2", ""])
def test_another_format_is_refused_with_those_that_there_are(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"tool_format: got '{name}', expected .*hermes \(Qwen"):
        VllmSampler(told(tmp_path, name))
