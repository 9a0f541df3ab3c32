"""``benchmarks/gpu/`` with its small model on a CPU: the scripts work, their sums are right.

What it measures here says nothing of a GPU.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.shapes import SHAPES, random_model, step_flops
from tests.support import forked_start
from tests.support.live_server import REPO
from tests.support.soak import share

torch.set_num_threads(1)


def figures(tmp_path: Path, part: str) -> dict[str, Any]:
    return json.loads((tmp_path / f"{part}-small.json").read_text())


@pytest.mark.vllm
@pytest.mark.soak("B4", 1, "GPU benchmark with all of its parts")
@pytest.mark.slow
@pytest.mark.timeout(900 if not share() else 3600)
@pytest.mark.xdist_group("gpu-benchmark")  # groups begin first, and this takes longest
def test_parts_write_one_report(tmp_path: Path) -> None:
    """In ``make test-vllm`` two parts: of vLLM, and of the whole server."""
    chosen = () if share() else ("--parts", "sampler", "server")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--small", "--out", tmp_path, *chosen],
        cwd=REPO,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    report = (tmp_path / "report-small.md").read_text()
    assert done.returncode == 0, report + done.stderr[-4000:]
    assert "failed" not in report
    check_vllms_and_the_servers(tmp_path, report)
    if share():
        check_the_others(tmp_path, report)


def check_vllms_and_the_servers(tmp_path: Path, report: str) -> None:
    assert "## The whole server" in report and "## Sampler" in report
    served = figures(tmp_path, "server")["places"]["embedded sampler"]
    assert all(check["passed"] for check in served["checks"]), served
    assert served["base_tokens_per_second"] > 0
    found = figures(tmp_path, "sampler")
    assert found["load"]["calls"] == 8 and found["dtype"] == "float32"
    seen = found["figures"]
    for name in ("base_tokens_per_second", "swap_seconds", "swap_seconds_under_load"):
        assert seen[name] > 0
    for name in ("gap_base", "gap_adapter"):
        assert seen[name]["mean"] < 1e-4
        assert seen[name]["tokens"] >= 8
    assert seen["same_after_sleep"] == 1.0
    assert seen["sleep_frees_bytes"] == 0  # there is none to free on a CPU


def check_the_others(tmp_path: Path, report: str) -> None:
    assert "left out" not in report
    for title in (
        *("## The gradient", "## Learner", "## Kernels of a step", "## The learner's ways"),
        *("## A fit: embedded sampler", "## The same step by other trainers"),
    ):
        assert title in report
    assert all(seen["passed"] for seen in figures(tmp_path, "exactness")["cases"].values())
    trainers = figures(tmp_path, "trainers")["trainers"]
    for other in ("TRL", "Unsloth"):
        assert trainers[other]["gradient_distance"] < 1e-4, other
        assert trainers[other]["over_ours"] > 0


def test_a_killed_part_leaves_what_it_had_as_valid_json(tmp_path: Path) -> None:
    """Killed as soon as it has a figure: no figure waits for the last one."""
    path, seen = tmp_path / "variants-small.json", set[int]()
    args, log = ["--small", "--out", str(tmp_path)], tmp_path / "log"
    part = forked_start.start("benchmarks.gpu.variants", args, dict(os.environ), REPO, log)
    while part.poll() is None and len(seen) < 3:
        if path.exists():
            seen.add(len(json.loads(path.read_text())["variants"]))
        time.sleep(0.05)
    part.kill()
    part.wait()
    assert len(seen) == 3, f"all figures came at once: {seen} {log.read_text()[-2000:]}"
    left = json.loads(path.read_text())
    assert len(left["variants"]) >= 3 and left["hardware"]["packages"]["torch"]
    for one in left["variants"].values():
        assert one["seconds"] > 0 and one["gradient_distance"] < 1e-5


def test_every_part_imports_with_what_the_lock_of_a_gpu_has_and_refuses_without_a_gpu(
    tmp_path: Path,
) -> None:
    """Without the tests' packages and the examples': the environment of docs/gpu.md has none."""
    locked = (REPO / "requirements/gpu.txt").read_text()
    for package in ("pytest", "pytest_asyncio", "langchain", "hypothesis"):
        assert not re.search(rf"^{package.replace('_', '-')}==", locked, re.MULTILINE), package
    code = (
        "import importlib, sys\n"
        "sys.modules |= dict.fromkeys(('pytest', 'pytest_asyncio', 'langchain', 'hypothesis'))\n"
        "from benchmarks.gpu.__main__ import PARTS, main\n"
        "for part in PARTS: importlib.import_module(f'benchmarks.gpu.{part}')\n"
        "main()\n"
    )
    args, log = [code, "--out", str(tmp_path)], tmp_path / "log"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    program = forked_start.start("tests.support.program_text", args, env, REPO, log)
    assert program.wait() == 2, log.read_text()[-2000:]
    assert "needs a GPU" in log.read_text()


def test_the_shapes_are_those_of_the_published_checkpoints() -> None:
    for name, count in (("qwen2.5-7b", 7_615_616_512), ("qwen3-8b", 8_190_735_360)):
        model = random_model(SHAPES[name](), torch.bfloat16, torch.device("meta"))
        assert sum(p.numel() for p in model.parameters()) == count


def test_the_operations_are_those_that_torch_counts() -> None:
    """Of a plain causal pass: all pairs are computed there, and every position is predicted."""
    import peft

    config, length, rank = SHAPES["small"](), 64, 16
    config._attn_implementation = "eager"
    base = random_model(config, torch.float32, torch.device("cpu"))
    lora = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(1, length + 1)[None]).logits.sum().backward()
    ours = step_flops(config, length, length * length, length, rank)
    assert counter.get_total_flops() == pytest.approx(ours, rel=0.02)
