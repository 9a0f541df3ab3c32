"""Peak memory of one step of 16 thousand distinct tokens: ``python -m benchmarks.learning.memory``.

Each way in a process of its own. ``forest`` is the learner as it is; ``one part`` the same with all
tokens alive at once; ``dense`` gives transformers' SDPA attention a mask of all pairs of tokens,
as ``art.unsloth.train.calculate_attn_bias`` makes it, and all tokens at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from benchmarks.learning.methods import CONFIG, Gradient, distance, make_core
from benchmarks.learning.workloads import sixteen_thousand
from langchain_art_server.algorithms.loss.objective import StepLoss
from langchain_art_server.algorithms.sequences.prefix_forest import grow
from langchain_art_server.backends.peft import packer
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.logprob_scoring import (
    CountedTokens,
    Predictions,
    ScoredBatch,
    TermPredictions,
    visit_terms,
)
from langchain_art_server.backends.peft.training_batch import step_tokens

WAYS = ("forest", "one part", "dense")


def peak() -> int:
    """Most memory that the process has held since `reset`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def forest(core: LearnerCore) -> int:
    config = CONFIG.model_copy(update={"tokens_per_microbatch": 1 << 20})
    batch = core.batch(sixteen_thousand().rows(), config)
    core.accumulate(batch, lambda _fraction, _message: None)
    return batch.packing.tokens


def dense(core: LearnerCore) -> int:
    """The forest's tokens under one mask."""
    rows = sixteen_thousand().rows()
    core.base.set_attn_implementation("sdpa")
    counted = CountedTokens.of(rows)
    trie = grow([row.token_ids[:-1] for row in rows])
    size = len(trie.token_ids_N)
    at, leave = torch.arange(size), torch.from_numpy(trie.exit_N)
    seen = (at[None, :] <= at[:, None]) & (at[:, None] < leave[None, :])
    bias = torch.where(seen, torch.tensor(0.0), torch.tensor(-torch.inf))
    del seen
    first = np.cumsum([0, *(len(row.token_ids) - 1 for row in rows)])
    before = np.concatenate(trie.rows)[first[counted.row_T] + counted.at_T - 1]
    targets = counted.column([row.token_ids for row in rows]).astype(np.int64)
    edges, edge = Predictions.merged(before, targets, np.ones(len(targets)), None, core.base)
    inputs = {
        "input_ids": torch.from_numpy(trie.token_ids_N)[None],
        "position_ids": torch.from_numpy(trie.depth_N)[None],
        "attention_mask": bias[None, None],
    }
    loss = StepLoss(step_tokens(rows, counted, core.base), CONFIG)
    loss.begin_update()
    outputs = core._scorer.outputs(inputs, edges.select_M)
    scored = ScoredBatch(core._scorer, outputs, edges, soon=True)
    terms = torch.arange(len(targets))
    visit_terms(loss.visit, terms, [(scored, TermPredictions(terms, torch.from_numpy(edge)))])
    scored.backward()
    return size


def measure(way: str, folder: Path) -> None:
    torch.set_num_threads(1)
    core = make_core()
    core.batch(sixteen_thousand().rows(), CONFIG)  # what is made once
    reset()
    before = peak()
    if way == "dense":
        tokens = dense(core)
    else:
        limit = packer.CPU_TOKENS if way == "forest" else 1 << 20
        with mock.patch.object(packer, "CPU_TOKENS", limit):
            tokens = forest(core)
    found = {"bytes": peak() - before, "tokens": tokens}
    torch.save({n: p.grad for n, p in core.parameters.items()}, folder / f"{way}.pt")
    print(json.dumps(found))


def measure_all(folder: Path) -> dict[str, dict[str, float]]:
    """Bytes beyond what the process held before the step, and tokens. Gradients must be equal."""
    found: dict[str, dict[str, float]] = {}
    gradients: dict[str, Gradient] = {}
    for way in WAYS:
        argv = [sys.executable, "-m", "benchmarks.learning.memory", way, str(folder)]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        found[way] = json.loads(done.stdout.splitlines()[-1])
        gradients[way] = torch.load(folder / f"{way}.pt")
        gap = distance(gradients["forest"], gradients[way])
        assert gap < 1e-5, (way, gap)
    return found


if __name__ == "__main__":
    measure(sys.argv[1], Path(sys.argv[2]))
