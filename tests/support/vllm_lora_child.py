"""The layers of vLLM's models that adapters reach, by vLLM's own loader.

Run in `environments.vllm_python()`; CASES is JSON, a list of [model, adapter, names of layers], the
names as for ``--lora-target-modules``::

    python vllm_lora_child.py CASES

For each case vLLM makes the class that it would serve and loads the adapter into it; weights are
not read and nothing is computed. A line of JSON on standard output says the `architecture`, the
layers of the adapter by vLLM's names that it put in place (`reached`), and those that it passed
over without a word (`dropped`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def reach(store: Path, model: str, adapter: str, names: Sequence[str]) -> dict[str, Any]:
    """What becomes of an adapter on a model; ranks, here one, meet at the file `store`."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.model_loader.utils import initialize_model

    options = EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=list(names),
    )
    config = options.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        destroy_model_parallel()  # that of the case before, which may be no mixture
        initialize_model_parallel()
        made = initialize_model(vllm_config=config)
        worker = WorkerLoRAManager(config, torch.device("cpu"), {})
        worker.create_lora_manager(made, config)
        loaded = worker._load_adapter(LoRARequest("a", 1, adapter))
        given = set(loaded.loras)
        manager = worker._adapter_manager
        manager.add_adapter(loaded)
        reached: set[str] = set()
        for name in manager.modules:
            if manager._get_lora_layer_weights(loaded, name):
                reached.update(manager.packed_modules.get(name, [name]))
    return {
        "architecture": type(made).__name__,
        "reached": sorted(given & reached),
        "dropped": sorted(given - reached),
    }


def main() -> None:
    """See the module."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # a process for each takes long
    with tempfile.TemporaryDirectory() as folder:
        for model, adapter, names in json.loads(sys.argv[1]):
            found = reach(Path(folder, "store"), model, adapter, names)
            sys.stdout.write(f"{json.dumps(found)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
