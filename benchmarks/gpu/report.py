"""The figures of ``benchmarks/gpu`` as Markdown, to be pasted into an issue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu.shapes import SHAPES
from langchain_art.gpu_memory import MemoryNeeds, Shape

Found = Mapping[str, Any]


def markdown(command: str, found: Mapping[str, Found], failed: Mapping[str, str]) -> str:
    """The report of the parts that wrote figures (`found`), and of those that did not, and why."""
    lines = ["# GPU benchmark of langchain-art", ""]
    if found:
        lines += _conditions(command, next(iter(found.values())))
    else:
        lines += [f"- command: `{command}`", ""]
    sections = {
        "exactness": _exactness,
        "server": _server,
        "sampler": _sampler,
        "learner": _learner,
        "profile": _profile,
        "variants": _variants,
        "endtoend": _endtoend,
        "trainers": _trainers,
    }
    for part, section in sections.items():
        if part in found:
            lines += section(found[part])
    for part, why in failed.items():
        lines += [f"## {part}: failed", "", "```text", why.strip(), "```", ""]
    return "\n".join(lines)


def _conditions(command: str, any_part: Found) -> list[str]:
    about = any_part["hardware"]
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    device = about.get("name") or f"{about['device']} ({about['machine']})"
    lines = [f"- date: {any_part['date']}", f"- command: `{command}`", f"- device: {device}"]
    if "memory" in about:
        lines[-1] += f", {_gigabytes(about['memory'])}"
        lines.append(f"- driver {about['driver']}, CUDA {about['cuda']}")
    else:
        lines.append("- clock: CPU time of each process; nothing here speaks of a GPU")
    lines.append(f"- Python {about['python']}, {packages}")
    model = f"- model: the shape of {any_part['model']}, random weights"
    return [*lines, f"{model}, {any_part['dtype']}, LoRA of rank {any_part['lora_rank']}", ""]


def _exactness(found: Found) -> list[str]:
    rows = [
        (
            case,
            "forest" if seen["forest"] else f"padded: {seen['padded_because']}",
            *(
                f"{seen[name]:.1e}" if name in seen else ""
                for name in ("float32, forest", "bfloat16, forest", "bfloat16, packed rows")
            ),
        )
        for case, seen in found["cases"].items()
    ]
    head = ("small model", "rows", "float32", "bfloat16", "bfloat16, nothing shared")
    title = "## The gradient: relative distance from the CPU's in float32"
    return [title, "", *_table(head, rows), ""]


def _server(found: Found) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for place, seen in found["places"].items():
        checks = {check["name"]: check for check in seen.get("checks", [])}
        failed = [name for name, check in checks.items() if not check["passed"]]
        if "failed" in seen or failed:
            rows.append((place, f"FAILED: {seen.get('failed') or ', '.join(failed)}", *[""] * 5))
            continue
        rows.append(
            (
                place,
                f"{len(checks)} of {len(checks)}",
                checks["learns"]["measured"],
                checks["sampler = learner, later steps"]["measured"].partition(",")[0],
                f"{seen['metrics']['swap_seconds']:.3f} s",
                f"{seen['base_tokens_per_second']:,.0f} tokens/s",
                f"{seen['start_seconds']:.0f} s",
            )
        )
    head = ("engines", "checks", "learns", "gap", "load of a version", "sampled", "start")
    title = f"## The whole server: the canary on the model {found['model']}"
    return [title, "", *_table(head, rows), ""]


def _sampler(found: Found) -> list[str]:
    load, seen = found["load"], found["figures"]
    shown = {
        "start_seconds": ("start", "{:.1f} s"),
        "base_tokens_per_second": ("base, sampled", "{:,.0f} tokens/s"),
        "adapter_tokens_per_second": ("adapter, sampled", "{:,.0f} tokens/s"),
        "swap_seconds": ("hot swap, no other calls", "{:.3f} s"),
        "swap_seconds_under_load": ("hot swap under load", "{:.3f} s"),
        "sleep_seconds": ("sleep", "{:.1f} s"),
        "sleep_frees_bytes": ("memory that sleep frees", "{:,.0f} bytes"),
        "wake_seconds": ("wake", "{:.1f} s"),
        "same_after_sleep": ("replies as before the sleep", "{:.0%}"),
    }
    rows = [(what, form.format(seen[name])) for name, (what, form) in shown.items() if name in seen]
    rows += [
        (
            f"logprobs, sampler to learner, {kind}",
            f"mean {seen[key]['mean']:.2e}, worst {seen[key]['max']:.2e} nats",
        )
        for kind, key in (("base", "gap_base"), ("adapter", "gap_adapter"))
        if key in seen
    ]
    title = f"## Sampler: vLLM, {load['calls']} calls at once, replies of {load['tokens']} tokens"
    return [title, "", *_table(("what", "figure"), rows), ""]


def _learner(found: Found) -> list[str]:
    lines = ["## Learner: one step", "", f"MFU of {found['peak_flops']:.3g} operations/s"]
    lines[-1] += f" ({found['peak_from']}). Estimate: what `langchain-art doctor` computes."
    if found["padded_because"]:
        lines[-1] += f" No forest: {found['padded_because']}."
    head = ("workload", "way", "tokens", "s", "run tokens/s", "MFU", "peak", "estimate")
    rows = [
        (
            workload,
            way + (", checkpointed" if seen["checkpointed"] else ""),
            f"{seen['tokens']:,}",
            f"{seen['seconds']:.3f}",
            f"{seen['run_tokens_per_second']:,.0f}",
            f"{seen['mfu']:.1%}",
            _gigabytes(seen["peak_bytes"]),
            _gigabytes(estimate(found, seen["alive"], checkpointed=seen["checkpointed"])),
        )
        for workload, about in found["workloads"].items()
        for way, seen in about["methods"].items()
    ]
    lines += ["", *_table(head, rows), ""]
    contexts = [
        (way, f"{seen['longest']:,} tokens", seen["limited_by"])
        for way, seen in found["longest_context_group_8"].items()
    ]
    return [*lines, *_table(("way", "longest context, group of 8", "limit"), contexts), ""]


def _profile(found: Found) -> list[str]:
    lines: list[str] = []
    for workload, seen in found["workloads"].items():
        rows = [
            (name, f"{one['seconds']:.4f}", f"{one['share']:.1%}", f"{one['launches']:,}")
            for name, one in seen["classes"].items()
        ]
        head = ("kernels", "s", "share", "launches")
        lines += [f"## Kernels of a step: {workload}", "", *_table(head, rows), ""]
    return lines


def _variants(found: Found) -> list[str]:
    rows = [
        (
            name,
            f"{one['seconds']:.3f}",
            _gigabytes(one["peak_bytes"]),
            f"{one['gradient_distance']:.1e}",
        )
        for name, one in found["variants"].items()
    ]
    head = ("the learner with", "s", "peak", "gradient's distance from the first")
    return ["## The learner's ways", "", *_table(head, rows), ""]


def _endtoend(found: Found) -> list[str]:
    about = f"{found['scenarios']} by {found['runs']} runs of {found['turns']} turns"
    rows = [
        (
            str(number),
            *(f"{seconds:.2f}" for seconds in one["seconds"].values()),
            f"{one['tokens'].get('completion', 0):,}",
        )
        for number, one in enumerate(found["steps"], 1)
    ]
    head = ("step", "rollouts", "gradient", "max_kl", "save", "swap", "all, s", "tokens sampled")
    return [f"## A fit: {found['place']}, {about}", "", *_table(head, rows), ""]


def _trainers(found: Found) -> list[str]:
    seen = found["trainers"]
    rows = [
        (
            name,
            f"{one['seconds']:.3f}",
            f"{found['run_tokens'] / one['seconds']:,.0f}",
            f"{one.get('over_ours', 1.0):.2f}",
            _gigabytes(one["peak_bytes"]) if one["peak_bytes"] else "",
            f"{one['gradient_distance']:.1e}" if "gradient_distance" in one else "",
        )
        for name, one in seen.items()
        if "seconds" in one
    ]
    head = ("trainer", "s", "run tokens/s", "time ÷ ours", "peak", "gradient's distance from ours")
    lines = [f"## The same step by other trainers ({found['workload']})", "", *_table(head, rows)]
    for name, one in seen.items():
        if "left_out" in one:
            lines += ["", f"{name} is left out:", "", "```text", one["left_out"], "```"]
    return [*lines, ""]


def estimate(found: Found, tokens: int, *, checkpointed: bool) -> int:
    """The doctor's bytes of a step with so many tokens at a time, without the process itself."""
    shape = Shape.of_config(SHAPES[found["model"]]().to_dict())
    cpu = "memory" not in found["hardware"]
    needs = MemoryNeeds(shape, found["dtype"], found["lora_rank"], cpu=cpu)
    return needs.step(tokens, checkpointed=checkpointed)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [_line(head), _line(tuple("---" for _ in head)), *map(_line, rows)]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
