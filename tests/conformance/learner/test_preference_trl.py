"""Preference steps against TRL's `DPOTrainer`, in an environment of its own, on the same pairs."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from langchain_art.wire import PreferenceConfig
from langchain_art_server.backends.peft.adapter_io import ADAM_EPS, SUPERVISED_MOMENTUM, adam_betas
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.environments import trl_python
from tests.support.learner_cases import FILES, VOCAB, folder, fresh
from tests.support.live_server import REPO
from tests.support.preference_cases import OfCore, make_pairs, prefer
from tests.support.soak import in_soak

STEPS = 5
#: Largest difference of a loss, and of a weight after the steps.
TOLERANCE = 1e-4
#: The gradient is clipped in some steps, and in others not.
CONFIG = PreferenceConfig(learning_rate=5e-3, beta=0.3, max_grad_norm=0.5)


@in_soak  # `test_preference` has the paper's loss in float64, `test_grpo_trl` steps of TRL
@pytest.mark.slow
@pytest.mark.timeout(600)  # the environment is made once
async def test_five_steps_are_those_of_trl(tiny: str, tmp_path: Path) -> None:
    core, pairs = LearnerCore(tiny), make_pairs(6, seed=11)
    parent = start = fresh(core, tmp_path)
    found: list[dict[str, float]] = []
    for step in range(1, STEPS + 1):
        out = folder(tmp_path, f"ours{step}")
        found.append(await prefer(OfCore(core), parent, out, step, pairs, CONFIG))
        parent = out
    theirs = tmp_path / "theirs"
    shutil.copytree(start, theirs)
    told = {
        "pairs": [
            {
                "prompt": pair.chosen[0][0],
                "chosen": pair.chosen[0][1],
                "rejected": pair.rejected[0][1],
            }
            for pair in pairs
        ],
        "steps": STEPS,
        "vocab": VOCAB,
        "betas": adam_betas(SUPERVISED_MOMENTUM),
        "eps": ADAM_EPS,
        **CONFIG.model_dump(include={"beta", "learning_rate", "max_grad_norm"}),
    }
    (theirs / "told.json").write_text(json.dumps(told))
    done = subprocess.run(
        [trl_python(), REPO / "tests/support/trl_dpo.py", theirs, tiny],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [one["loss"] for one in found]
    assert losses == pytest.approx(json.loads((theirs / "losses.json").read_text()), abs=TOLERANCE)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < 0.5
    norms = [one["grad_norm"] for one in found]
    assert min(norms) < CONFIG.max_grad_norm < max(norms)
    wanted, got = load_file(theirs / "after.safetensors"), load_file(parent / FILES[1])
    first = load_file(start / FILES[1])
    assert wanted.keys() == got.keys()
    apart = max((got[name] - wanted[name]).abs().max().item() for name in got)
    moved = max((got[name] - first[name]).abs().max().item() for name in got)
    assert apart <= TOLERANCE < 0.01 < moved
    assert all(tensor.dtype == torch.float32 for tensor in wanted.values())
