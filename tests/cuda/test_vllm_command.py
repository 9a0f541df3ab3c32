"""The command that starts vLLM, read by vLLM's own CUDA build: its parser and its engine's config.

The build is that of ``requirements/gpu.txt``, unpacked beside CPU torch; see
`tests.support.vllm_cuda_child` for what is given in place of a GPU. No kernel runs.
"""

import json
import os
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import transformers

from langchain_art_server.backends.base import ModelInfo
from langchain_art_server.backends.vllm.process import VllmProcess
from langchain_art_server.config import Settings
from tests.support import vllm_cuda_child
from tests.support.environments import vllm_cuda_python
from tests.support.tiny_models import tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
TARGETS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
#: Bytes of keys and values of a token of Qwen3-8B in bfloat16, and of so many in a block of vLLM's.
TOKEN, BLOCK = 2 * 36 * 8 * 128 * 2, 16
CACHE = 10_000 * TOKEN
#: Two cards, the context and the cache said.
EXPLICIT: dict[str, Any] = {
    "sampler": {
        "kind": "vllm",
        "gpu_memory": 0.9,
        "kv_cache_bytes": 7 << 30,
        "max_loras": 6,
        "max_batch": 64,
        "args": ["--tensor-parallel-size=2"],
    },
    "max_model_len": 8192,
}
#: One card in turns, the context left to vLLM.
IN_TURNS: dict[str, Any] = {
    "sampler": {"kind": "vllm", "gpu_memory": 0.611},
    "take_turns": True,
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What vLLM makes of the commands of `EXPLICIT` and `IN_TURNS` for Qwen3-8B."""
    folder = tmp_path_factory.mktemp("vllm")
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )
    model = folder / "model"
    config.save_pretrained(model)
    tokenizer().save_pretrained(model)
    info = ModelInfo("base", str(model), 8_190_735_360, "cuda", "bfloat16", 32768, 151936, 16)
    commands: list[list[str]] = []
    env: dict[str, str] = {}
    for number, table in enumerate((EXPLICIT, IN_TURNS)):
        settings = Settings.model_validate({"model": str(model), "data_dir": folder} | table)
        (socket := folder / str(number)).mkdir()
        of = replace(info, max_model_len=settings.max_model_len or info.max_model_len)
        process = VllmProcess(settings, of, socket, TARGETS, 16)
        _python, flag, *command = process.command()
        assert flag == "-m"
        commands.append(command)
        env = process._environment()
    child = [str(vllm_cuda_python()), vllm_cuda_child.__file__]
    argv = [*child, "2", str(CACHE), json.dumps(commands)]
    done = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, cwd=folder)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(commands), done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in lines]


def test_it_is_the_engine_that_a_gpu_gets_and_records_what_it_samples(
    configs: list[dict[str, Any]],
) -> None:
    for found, loras in zip(configs, (6, 4), strict=True):
        assert found["platform"] == "NvmlCudaPlatform"
        assert found["runner"] == 2
        assert found["dtype"] == "torch.bfloat16"
        assert found["cudagraphs"] == "FULL_AND_PIECEWISE"
        assert found["prefix_caching"] and found["chunked_prefill"] and found["async_scheduling"]
        assert found["logprobs_mode"] == "processed_logprobs"
        assert found["generation_config"] == "vllm"
        assert found["grammars"] == "guidance"
        assert (found["max_loras"], found["max_cpu_loras"]) == (loras, 32)
        assert (found["max_lora_rank"], found["lora_dtype"]) == (16, "torch.bfloat16")
        assert found["lora_targets"] == TARGETS


def test_memory_cards_and_context_are_those_of_the_settings(configs: list[dict[str, Any]]) -> None:
    explicit, in_turns = configs
    assert explicit["tensor_parallel"] == 2 and explicit["executor"] == "mp"
    assert explicit["gpu_memory_utilization"] == 0.9
    assert explicit["kv_cache_memory_bytes"] == 7 << 30
    assert explicit["max_num_seqs"] == 64 + 8
    assert not explicit["sleep"]
    assert (explicit["asked_model_len"], explicit["max_model_len"]) == (8192, 8192)
    assert in_turns["tensor_parallel"] == 1
    assert in_turns["gpu_memory_utilization"] == 0.611
    assert in_turns["kv_cache_memory_bytes"] is None
    assert in_turns["sleep"]
    # A context that was not asked for is what the cache holds.
    assert in_turns["asked_model_len"] == -1
    assert 10_000 - 2 * BLOCK <= in_turns["max_model_len"] <= 10_000
