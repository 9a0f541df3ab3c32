"""The gradient on this GPU against the CPU's: ``python -m benchmarks.gpu.exactness [--small]``.

Small random models, one for each ratio of heads to key heads and each kind of attention. For each:
the gradient of one step of an agent's runs, all of the adapter's parameters together, as the
relative distance from the CPU's in float32, which `tests/conformance/learner` holds to a naive one
in float64. In float32 the GPU's must be equal but for rounding (`EQUAL`); in bfloat16 the forest's
must be no further away than that of rows end to end, in which no two share a token (`WORSE`).

Writes ``out/bench/gpu/exactness-small.json``; ends with status 1 if one is not.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.learner import EQUAL, OUT, conditions, core_of, keep, methods, settle
from benchmarks.learning.methods import Gradient, Method, as_it_is, distance
from benchmarks.learning.workloads import VOCAB, Workload, few_tokens, short_tool_agent
from langchain_art_server.backends.peft.learner_core import LearnerCore

#: What a forest in bfloat16 may be further away than rows end to end in bfloat16.
WORSE = 1.25
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
#: Name -> configuration class, and what it has beside `SIZES`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"Qwen3, heads ÷ key heads = {8 // keys}": ("Qwen3Config", {"num_key_value_heads": keys})
        for keys in (8, 4, 2, 1)
    },
    "Qwen3, heads ÷ key heads = 7": (
        "Qwen3Config",
        {"num_attention_heads": 7, "num_key_value_heads": 1},
    ),
    "Qwen2.5, heads of 128": (
        "Qwen2Config",
        {"num_attention_heads": 4, "num_key_value_heads": 1},
    ),
    "Llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "Mistral, sliding window": (
        "MistralConfig",
        {"num_key_value_heads": 2, "sliding_window": 256},
    ),
    "Gemma 3, heads of 256": (
        "Gemma3TextConfig",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 256,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
console = Console()


def core_on(model: Any, device: str, dtype: str) -> LearnerCore:
    """Our learner on a copy of a model, with an adapter that is always the same."""
    copied = copy.deepcopy(model).to(device, getattr(torch, dtype)).eval().requires_grad_(False)
    return core_of(copied, "small")


def gradient_of(core: LearnerCore, method: Method, workload: Workload) -> Gradient:
    """Of one step, on the CPU."""
    with method.around(core):
        found = method.gradient(core, workload.rows())
    return {name: one.float().cpu() for name, one in found.items()}


def measure(case: str, device: torch.device, workload: Workload) -> dict[str, Any]:
    """The distances of one case."""
    kind, own = CASES[case]
    config = getattr(transformers, kind)(**SIZES | own)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ours = Method("forest", Workload.rows, as_it_is)
    wanted = gradient_of(core_on(model, "cpu", "float32"), ours, workload)
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        core = core_on(model, str(device), dtype)
        found["forest"] = core.packer.padded_because is None
        found["padded_because"] = core.packer.padded_because
        for method in methods() if found["forest"] else [ours]:
            found[f"{dtype}, {method.name}"] = distance(wanted, gradient_of(core, method, workload))
        del core
        settle(device)
    found["passed"] = found["float32, forest"] < EQUAL and (
        not found["forest"] or found["bfloat16, forest"] < WORSE * found["bfloat16, packed rows"]
    )
    return found


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    asked.add_argument("--small", action="store_true", help="two cases of few tokens, for a CPU")
    asked.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked.add_argument("--out", type=Path, default=OUT)
    given = asked.parse_args()
    device, cases = torch.device(given.device), list(CASES)
    if device.type == "cpu" and not given.small:
        asked.error("it needs a GPU to compare with the CPU; --small proves the script on a CPU")
    workload = few_tokens() if given.small else short_tool_agent()
    found: dict[str, Any] = {}
    path = given.out / "exactness-small.json"
    about = conditions("exactness", "small", device) | {"dtype": "float32 and bfloat16"}
    for case in cases[: 2 if given.small else None]:
        found[case] = measure(case, device, workload)
        keep(path, about | {"cases": found})
    table = Table("model", "layout", "float32", "bfloat16", "bfloat16, rows end to end", "")
    for case, seen in found.items():
        numbers = [
            f"{seen[name]:.1e}" if name in seen else ""
            for name in ("float32, forest", "bfloat16, forest", "bfloat16, packed rows")
        ]
        layout = "forest" if seen["forest"] else "padded"
        table.add_row(case, layout, *numbers, "" if seen["passed"] else "FAILED")
    console.print(table)
    console.print(path)
    sys.exit(0 if all(seen["passed"] for seen in found.values()) else 1)


if __name__ == "__main__":
    main()
