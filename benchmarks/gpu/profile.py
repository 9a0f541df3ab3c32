"""Kernels of a step by class: ``python -m benchmarks.gpu.profile [--model NAME] [--small]``.

From rows in memory to the gradient, as `benchmarks.gpu.learner` measures it, once under torch's
profiler after one step that is not counted: seconds and launches of each class of kernels, and the
longest kernels. On a CPU these are torch's operators, whose classes are fewer.

Writes ``out/bench/gpu/profile-NAME.json`` after each workload.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.learner import conditions, console, keep, make_core, methods, settle, take
from benchmarks.gpu.parts import arguments
from benchmarks.learning.workloads import few_tokens, long_agent, shared_prompt

#: Class -> what a kernel's or an operator's name holds; the first that fits.
CLASSES = {
    "attention": r"flex_attention|flash|fmha|sdpa|scaled_dot_product|aten::bmm",
    "products of matrices": r"gemm|cutlass|nvjet|cublas|splitk|aten::(addmm|mm|linear)",
    "norms": r"rms_norm|layer_norm|RMSNorm|LayerNorm",
    "softmax and logits": r"softmax|logsumexp|nll",
    "indices": r"index|gather|scatter|embedding",
    "copies": r"memcpy|memset|copy|CatArray|aten::(cat|clone|_to_copy|contiguous|pad|fill|zero)",
    "reductions": r"reduce|aten::(sum|mean|max|norm)",
    "elementwise": r"elementwise|aten::(mul|add|sub|div|neg|silu|pow|rsqrt|exp|sigmoid)|triton_",
}
LONGEST = 25


def class_of(kernel: str) -> str:
    """The class of a kernel by its name."""
    found = (name for name, pattern in CLASSES.items() if re.search(pattern, kernel, re.IGNORECASE))
    return next(found, "other")


def by_class(events: Iterable[tuple[str, float, int]]) -> dict[str, Any]:
    """Seconds, share and launches of each class, the largest first, of names, seconds, counts."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, seconds, count in events:
        spent[class_of(name)][0] += seconds
        spent[class_of(name)][1] += count
    total = sum(seconds for seconds, _ in spent.values()) or 1.0
    return {
        name: {"seconds": seconds, "share": seconds / total, "launches": int(count)}
        for name, (seconds, count) in sorted(spent.items(), key=lambda one: -one[1][0])
    }


def events_of(seen: profile, device: torch.device) -> list[tuple[str, float, int]]:
    """Name, seconds and count of each kernel; of each operator alone, on a CPU."""
    gpu = device.type == "cuda"
    wanted = DeviceType.CUDA if gpu else DeviceType.CPU
    return [
        (
            one.key,
            (one.self_device_time_total if gpu else one.self_cpu_time_total) / 1e6,
            one.count,
        )
        for one in seen.key_averages()
        if one.device_type == wanted
    ]


def main() -> None:
    given = arguments(__doc__, "profile")
    device = given.device
    core = make_core(given.name, device, torch.float32 if given.small else torch.bfloat16)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    workloads: dict[str, Any] = {}
    found = conditions("profile", given.name, device) | {"workloads": workloads}
    for workload in [few_tokens()] if given.small else [long_agent(), shared_prompt()]:
        method, rows = methods()[0], workload.rows()
        take(core, method, rows)
        settle(device)
        with profile(activities=activities) as seen:
            seconds, _ = take(core, method, rows)
        events = sorted(events_of(seen, device), key=lambda one: -one[1])
        workloads[workload.name] = {
            "tokens": method.tokens,
            "seconds_profiled": seconds,
            "classes": by_class(events),
            "longest": [
                dict(zip(("name", "seconds", "count"), one, strict=True)) for one in events
            ][:LONGEST],
        }
        keep(given.path, found)
        console.print(workload.name, workloads[workload.name]["classes"])


if __name__ == "__main__":
    main()
