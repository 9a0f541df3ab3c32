"""vLLM's CUDA build on a machine without a GPU, up to the moment when it would start its engine.

Run in `environments.vllm_cuda_python()`; COMMANDS is JSON, a list of commands without
``python -m``::

    python vllm_cuda_child.py CARDS CACHE_BYTES COMMANDS

Its own API server parses each command's options and makes the engine's config, which is written to
standard output as a line of JSON, with the context that fits CACHE_BYTES of keys and values on each
card by its own functions. Given are what a GPU and its driver would have answered: NVML's list of
cards (H100s of 80 GiB), torch's "CUDA is available", and that memory can be mapped (for sleep). Of
the compiled extensions those in `EMPTY` are empty: they link to CUDA's libraries. The model's
class is inspected in this process, not in a further one that would not see all this.
"""

from __future__ import annotations

import json
import runpy
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch

BYTES = 80 << 30
#: Of vLLM's compiled extensions: its kernels, and FlashAttention's two.
EMPTY = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)


class Configured(Exception):
    """What was configured; ends the server."""


def fake_cards(count: int) -> None:
    """NVML, as vLLM's copy of its bindings gives it, and what torch says of the same cards."""
    # Without vLLM itself, which asks for the cards as it is imported.
    place = find_spec("vllm")
    assert place is not None and place.submodule_search_locations
    home = Path(place.submodule_search_locations[0], "third_party")
    bindings = _load("vllm.third_party", home / "__init__.py", [str(home)])
    bindings.pynvml = pynvml = _load("vllm.third_party.pynvml", home / "pynvml.py")
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": count,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=BYTES),
    }
    for name, answer in answers.items():
        setattr(pynvml, name, lambda *_args, _answer=answer: _answer)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: count


def _load(name: str, file: Path, inside: list[str] | None = None) -> Any:
    spec = spec_from_file_location(name, file, submodule_search_locations=inside)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fitted_context(config: Any, cache_bytes: int) -> int:
    """Tokens of the longest call, once vLLM has laid out its cache on each card."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    model, parallel = config.model_config, config.parallel_config
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    layers = {f"layers.{n}": spec for n in range(model.get_num_layers(parallel))}
    cards = parallel.tensor_parallel_size
    # The engine asks its workers, whose FlashAttention prefers this one.
    config.cache_config.kv_cache_layout = "LBNHC"
    get_kv_cache_configs(config, [layers] * cards, [cache_bytes] * cards)
    return model.max_model_len


def note(config: Any, cache_bytes: int) -> NoReturn:
    """Raises `Configured`."""
    from vllm.platforms import current_platform

    asked = config.model_config.original_max_model_len
    found = {
        "platform": type(current_platform).__name__,
        "runner": 2 if config.use_v2_model_runner else 1,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "dtype": str(config.model_config.dtype),
        "asked_model_len": asked,
        "max_model_len": fitted_context(config, cache_bytes),
        "logprobs_mode": config.model_config.logprobs_mode,
        "generation_config": config.model_config.generation_config,
        "sleep": config.model_config.enable_sleep_mode,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        "lora_dtype": str(config.lora_config.lora_dtype),
        "max_loras": config.lora_config.max_loras,
        "max_cpu_loras": config.lora_config.max_cpu_loras,
        "max_lora_rank": config.lora_config.max_lora_rank,
        "lora_targets": config.lora_config.target_modules,
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "executor": config.parallel_config.distributed_executor_backend,
        "cudagraphs": config.compilation_config.cudagraph_mode.name,
        "grammars": config.structured_outputs_config.backend,
    }
    raise Configured(found)


def main() -> None:
    count, cache_bytes, commands = sys.argv[1:]
    for name in EMPTY:
        sys.modules[name] = ModuleType(name)
    fake_cards(int(count))
    from vllm.platforms.cuda import CudaPlatform

    CudaPlatform.is_cumem_allocator_available = lambda _self: True
    CudaPlatform.device_count = classmethod(lambda _cls: int(count))
    from vllm.model_executor.models import registry
    from vllm.v1.engine.async_llm import AsyncLLM

    registry._run_in_subprocess = lambda inspect: inspect()
    AsyncLLM.from_vllm_config = lambda vllm_config, **_options: note(vllm_config, int(cache_bytes))
    for module, *options in json.loads(commands):
        sys.argv = [module, *options]
        try:
            runpy.run_module(module, run_name="__main__")
        except Configured as configured:
            sys.stdout.write(json.dumps(configured.args[0]) + "\n")


if __name__ == "__main__":
    main()
