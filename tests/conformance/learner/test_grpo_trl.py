"""Steps by rewards against TRL's `GRPOTrainer`, in an environment of its own, on the same runs.

Two model families, six settings, five steps each in ``make soak``; three settings of each family
and two steps in ``make test``. Both get tokens and rewards, so that what is compared is all from
there on: advantages, weights of tokens, loss, clipping, optimizer.
"""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from langchain_art.credit.batch_plan import call_weights
from langchain_art.credit.credit_assignment import pool_advantages
from langchain_art.wire import CISPO, ClippedRatio, ConstantAggregation, KLPenalty, TrainConfig
from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.adapter_io import ADAM_EPS, adam_betas
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.environments import trl_python
from tests.support.learner_cases import FILES, VOCAB, folder, fresh, quiet, save_models, shake
from tests.support.live_server import REPO
from tests.support.soak import count, share

STEPS, GROUPS, SIZE, LONGEST = count(2, 5), 3, 4, 12
#: Largest difference of the change of any weight over the steps, as a share of the largest change.
#: Both compute in float32, and sum in other orders.
TOLERANCE = 1e-4
RATE, MOST_NORM = 3e-3, 0.5
#: Both engines are one model: nothing is corrected or left out for a sampler that differs.
SAME: dict[str, Any] = {"guard": None, "max_logprob_gap": None, "max_kl": None}
MEAN: dict[str, Any] = SAME | {"advantage": "mean"}
PLAIN: dict[str, Any] = {"dual_clip": None, "importance_sampling": None}
DAPO = ClippedRatio(**PLAIN)
#: name -> our config, and TRL's settings.
SETTINGS: dict[str, tuple[TrainConfig, dict[str, Any]]] = {
    "grpo": (
        TrainConfig(
            advantage="standardized",
            loss=ClippedRatio(**PLAIN, clip_high=0.2, aggregation="run"),
            **SAME,
        ),
        {"loss_type": "grpo", "scale_rewards": "group"},
    ),
    "dapo": (TrainConfig(loss=DAPO, **MEAN), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": (
        TrainConfig(
            loss=ClippedRatio(
                **PLAIN, aggregation=ConstantAggregation(value=GROUPS * SIZE * LONGEST)
            ),
            **MEAN,
        ),
        {"loss_type": "dr_grpo", "epsilon_high": 0.28, "max_completion_length": LONGEST},
    ),
    "two updates": (
        TrainConfig(loss=DAPO, optimizer_steps=2, **MEAN),
        {"loss_type": "dapo", "epsilon_high": 0.28, "num_iterations": 2},
    ),
    "cispo, two updates": (
        TrainConfig(
            loss=CISPO(clip_high=0.05, importance_sampling=None), optimizer_steps=2, **MEAN
        ),
        {"loss_type": "cispo", "epsilon_high": 1.05, "num_iterations": 2},
    ),
    "kl, colder": (
        TrainConfig(loss=DAPO, kl=KLPenalty(estimator="k3", coefficient=0.2, reference=0), **MEAN),
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.2, "temperature": 0.7},
    ),
}


def runs_of(seed: int) -> list[dict[str, Any]]:
    """Groups of runs of one prompt each; no reply holds token 0, at whose end TRL would stop."""
    rng, found = random.Random(seed), list[dict[str, Any]]()
    for _ in range(GROUPS):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(2, 9))]
        for _ in range(SIZE):
            reply = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, LONGEST + 1))]
            found.append({"prompt": prompt, "reply": reply, "reward": rng.random()})
    return found


def rows_for(runs: list[dict[str, Any]], config: TrainConfig, temperature: float) -> list[Row]:
    """The rows of a step, as a job makes them of rewards."""
    advantages: list[float] = []
    for at in range(0, len(runs), SIZE):
        pool = [[run["reward"]] for run in runs[at : at + SIZE]]
        advantages += [one for [one] in pool_advantages(pool, config.advantage.kind) or []]
    calls = [(at, len(run["reply"])) for at, run in enumerate(runs)]
    weights = call_weights(calls, config.loss.aggregation)
    return [
        row
        for at, run in enumerate(runs)
        for row in rows_of_run(
            [
                SampledCall(
                    f"call-{at}",
                    run["prompt"],
                    run["reply"],
                    [-1.0] * len(run["reply"]),
                    temperature,
                    advantages[at],
                    weights[at],
                )
            ]
        )
    ]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(600)  # the environment is made once
def test_some_steps_are_those_of_trl(tmp_path: Path) -> None:
    models = save_models(folder(tmp_path, "models"))
    told: list[dict[str, Any]] = []
    ours, norms = list[Path](), list[float]()
    for other, family in enumerate(("qwen3", "llama")):
        core = LearnerCore(str(models[family]))
        start = shake(fresh(core, tmp_path))
        for number, (config, theirs) in enumerate(SETTINGS.values()):
            if number % 2 != other and not share():
                continue
            runs = runs_of(seed=number)
            temperature = theirs.get("temperature", 1.0)
            used = config.model_copy(update={"learning_rate": RATE, "max_grad_norm": MOST_NORM})
            parent, metrics = start, list[dict[str, float]]()
            for step in range(1, STEPS + 1):
                out = folder(tmp_path, f"ours-{family}-{number}-{step}")
                rows = rows_for(runs, config, temperature)
                # TRL measures from what an adapter was when it was given.
                request = LearnerStep(parent, out, step, rows, used, reference=start)
                metrics.append(core.step(request, quiet))
                parent = out
            ours.append(parent)
            assert config.optimizer_steps == 1 or any(
                one["clip_low_fraction"] + one["clip_high_fraction"] > 0 for one in metrics
            ), "what two updates have that one has not"
            norms += [one["grad_norm"] for one in metrics]
            where = tmp_path / f"theirs-{family}-{number}"
            shutil.copytree(start, where)
            common = {
                "learning_rate": RATE,
                "max_grad_norm": MOST_NORM,
                "max_steps": int(sum(one["updates"] for one in metrics)),
                **dict(zip(("adam_beta1", "adam_beta2"), adam_betas(config.momentum), strict=True)),
                "adam_epsilon": ADAM_EPS,
                "temperature": 1.0,
                "max_completion_length": LONGEST,
                "scale_rewards": "none",
                "beta": 0.0,
            }
            told.append(
                {
                    "model": str(models[family]),
                    "adapter": str(where),
                    "runs": runs,
                    "size": SIZE,
                    "vocab": VOCAB,
                    "settings": common | theirs,
                }
            )
    assert min(norms) < MOST_NORM < max(norms), "some gradients are cut, and some are not"
    (tmp_path / "told.json").write_text(json.dumps(told))
    done = subprocess.run(
        [trl_python(), REPO / "tests/support/trl_grpo.py", tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, float] = {}
    for case, mine in zip(told, ours, strict=True):
        where = Path(case["adapter"])
        first, got = load_file(where / FILES[1]), load_file(mine / FILES[1])
        wanted = load_file(where / "after.safetensors")
        assert wanted.keys() == got.keys()
        apart = max((got[name] - wanted[name]).abs().max().item() for name in got)
        moved = max((got[name] - first[name]).abs().max().item() for name in got)
        assert moved > RATE
        found[f"{where.name}: {case['settings']['loss_type']}"] = apart / moved
    assert max(found.values()) <= TOLERANCE, found
