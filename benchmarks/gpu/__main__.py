"""All figures of a GPU in one report: ``python -m benchmarks.gpu [--model NAME] [--small]``.

The parts are processes, one after the other, which write each figure as it comes: a part that fails
or is killed leaves what it had and the others' figures, and the report says why. Writes
``out/bench/gpu/report-NAME.md`` after each part, to be pasted into an issue, and beside it each
part's JSON and output.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.gpu.learner import OUT
from benchmarks.gpu.report import markdown
from benchmarks.gpu.shapes import SHAPES
from tests.support.environments import environment, vllm_python
from tests.support.live_server import REPO

PARTS = (
    *("exactness", "learner", "profile", "variants"),
    *("endtoend", "sampler", "server", "trainers"),
)
#: What makes the learner's part short on a CPU.
SHORT = ["--rounds", "1", "--workloads", "shared_prompt", "--most", "128"]
#: Characters of a failed part's output in the report.
LAST = 1500
console = Console()


def sampler_python(chosen: Path | None, *, small: bool) -> Path:
    """A Python with vLLM: the chosen one, this one, or one that is made for it."""
    if chosen is not None or importlib.util.find_spec("vllm") is not None:
        return chosen or Path(sys.executable)
    if small:
        return vllm_python()
    locked = (REPO / "requirements/gpu.txt").read_text()
    return environment("vllm-gpu", re.findall(r"^(vllm==\S+)", locked, re.MULTILINE))


def model_of(part: str, given: argparse.Namespace) -> str:
    """What a part measures, by which its figures are named."""
    fixed = {"exactness": "small", "server": "demo"}
    return "small" if given.small else fixed.get(part, str(given.model))


def options_of(part: str, given: argparse.Namespace) -> list[str]:
    """The command line of a part. Raises what the installation of vLLM raises."""
    model = model_of(part, given)
    options = ["--small"] if given.small else []
    if not given.small and part != "exactness":
        options = ["--model", model]
    if part == "sampler" or (part in ("server", "endtoend") and not given.small):
        python = sampler_python(given.vllm_python, small=given.small)
        options += ["--python", str(python)]
    if part == "learner" and given.small:
        options += SHORT
    return options


def take_part(part: str, given: argparse.Namespace) -> str:
    """Run one part; its last output if it failed, else nothing."""
    out: Path = given.out
    try:
        options = options_of(part, given)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        return f"has no vLLM, which could not be installed: {str(error)[-LAST:]}"
    log = out / f"{part}.log"
    with log.open("w") as file:
        argv = [sys.executable, "-m", f"benchmarks.gpu.{part}", *options, "--out", str(out)]
        done = subprocess.run(argv, stdout=file, stderr=subprocess.STDOUT)
    if not done.returncode:
        return ""
    return f"ended with status {done.returncode}; {log} ends:\n{log.read_text()[-LAST:]}"


def main() -> None:
    asked = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    asked.add_argument("--model", choices=[n for n in SHAPES if n != "small"], default="qwen3-8b")
    asked.add_argument("--small", action="store_true", help="a model for a CPU, to see it work")
    asked.add_argument("--vllm-python", type=Path, help="a Python that has vLLM")
    asked.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    asked.add_argument("--out", type=Path, default=OUT)
    given = asked.parse_args()
    if not given.small and not torch.cuda.is_available():
        asked.error(f"{given.model} needs a GPU, and torch sees none; --small works on a CPU")
    name = "small" if given.small else given.model
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    found, failed = {}, dict[str, str]()
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    report = out / f"report-{name}.md"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("", total=len(given.parts))
        for part in given.parts:
            progress.update(bar, description=f"{part} (its output: {out / part}.log)")
            path = out / f"{part}-{model_of(part, given)}.json"
            path.unlink(missing_ok=True)
            if why := take_part(part, given):
                failed[part] = why
                progress.print(f"{part} {why}", markup=False, soft_wrap=True)
            if path.exists():
                found[part] = json.loads(path.read_text())
            report.write_text(markdown(command, found, failed))
            progress.advance(bar)
    console.print(report.read_text(), markup=False, soft_wrap=True)
    console.print(f"The report is in {report}.")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
