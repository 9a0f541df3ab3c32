"""Other libraries' steps, in processes and environments of their own, on the same tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.learning.methods import Gradient
from benchmarks.learning.workloads import VOCAB, Workload
from langchain_art_server.algorithms.sequences.training_rows import Row, rows_of_run
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.environments import environment

HERE = Path(__file__).parent
#: What each asks for, with the torch release that we have.
TRL = ["torch==2.13.0", "transformers==5.23.0", "peft==0.21.2", "trl==1.16.0", "jmespath"]
ART = [
    *("torch==2.13.0", "transformers==5.2.0", "peft==0.21.2"),
    *("trl==0.20.0", "pillow", "openpipe-art==0.5.23"),
]
#: ART's newest releases are written in the syntax of Python 3.12. Where pip knows no CPU build of
#: torch for it, PyPI's CUDA build is installed, which computes on a CPU all the same.
ART_PYTHON = "3.12"


def trl_python() -> Path:
    """Of an environment with TRL."""
    return environment("trl", TRL)


def art_python() -> Path:
    """Of an environment with ART."""
    return environment("art", ART, ART_PYTHON)


class Child:
    """A process that takes a step whenever it is asked to.

    Args:
        script: of this folder.
        python: of its environment.
        folder: of the model and the adapter that it gets.
        told: the runs that it gets, see `describe`.
        options: further arguments of the script.
    """

    def __init__(
        self,
        script: str,
        python: Path,
        folder: Path,
        told: dict[str, Any],
        *options: str,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="art-bench-child-"))
        shutil.copytree(folder, self._folder, dirs_exist_ok=True, copy_function=os.link)
        (self._folder / "rows.json").write_text(json.dumps(told))
        self._log = (self._folder / "log").open("w")
        self._process = subprocess.Popen(
            [python, HERE / f"child_{script}.py", self._folder, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"},
        )
        self._hear("ready")

    def step(self) -> dict[str, float]:
        """What it says of one step, `seconds` among it."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write("go\n")
        stdin.flush()
        found = self._hear("seconds")
        self._hear("ready")
        return found

    def gradient(self) -> Gradient:
        """Of its first step."""
        return load_file(self._folder / "gradient.safetensors")

    def file(self, name: str) -> Gradient:
        """Tensors that it left."""
        return load_file(self._folder / name)

    def close(self) -> None:
        """End it, and take its folder away."""
        self._process.kill()
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _hear(self, word: str) -> dict[str, float]:
        stdout = self._process.stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith("{") and word in (said := json.loads(line)):
                return said
        raise RuntimeError((self._folder / "log").read_text()[-4000:])


def describe(core: LearnerCore, workload: Workload) -> dict[str, Any]:
    """A workload as the children read it, with the logprobs that our learner gives its tokens."""
    rows: list[dict[str, Any]] = []
    for run, calls in enumerate(workload.credited_runs()):
        for row in rows_of_run(calls):
            rows.append({"run": run, "row": row})
    found = core.logprobs(Path(core.name), [entry["row"] for entry in rows])
    return {
        "vocab": VOCAB,
        "size": workload.size,
        "rewards": workload.rewards,
        "rows": [
            {
                "run": entry["run"],
                "token_ids": entry["row"].token_ids,
                "mask": entry["row"].mask,
                "calls": entry["row"].calls,
                "logprobs": own.tolist(),
            }
            for entry, own in zip(rows, found, strict=True)
        ],
    }


def rows_of_packed(packed: Gradient) -> list[Row]:
    """What ART made of the runs, as rows for our learner: the same tokens, weights, advantages.

    In a packed row, each stretch of one group id goes on with the stretch that its parent id names.
    What is trained stands in stretches of their own; one that is its own parent begins a row.
    """
    rows: list[Row] = []
    names = ("tokens", "assistant_mask", "weights", "advantages", "group_ids", "parent_ids")
    for ids, mask, weights, advantages, groups, parents in zip(
        *(packed[name] for name in names), strict=True
    ):
        share = weights * mask / (float(mask.sum()) + 1e-6)  # the mean over a row's trained tokens
        for group in groups[mask.bool()].unique().tolist():
            line = [group]
            while (parent := int(parents[groups == line[-1]][0])) != line[-1]:
                line.append(parent)
            seen = torch.isin(groups, torch.tensor(line))
            trained = mask[seen].int().tolist()
            rows.append(
                Row(
                    token_ids=ids[seen].tolist(),
                    mask=trained,
                    logprobs=[-1.0 * m for m in trained],
                    advantages=(advantages * mask)[seen].tolist(),
                    weights=share[seen].tolist(),
                )
            )
    return rows
