"""Steps against TRL's trainers, in an environment of its own, on the same runs and pairs.

By rewards, with `GRPOTrainer`: two model families, six settings, five steps each in ``make soak``;
three settings of each family and two steps in ``make test``. Both get tokens and rewards, so that
what is compared is all from there on: advantages, weights of tokens, loss, clipping, optimizer. By
preferences, with `DPOTrainer`.
"""

import json
import math
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from langchain_art.credit.batch_plan import call_weights
from langchain_art.credit.credit_assignment import pool_advantages
from langchain_art.wire import (
    CISPO,
    ClippedRatio,
    ConstantAggregation,
    KLPenalty,
    PreferenceConfig,
    TrainConfig,
)
from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.adapter_io import ADAM_EPS, SUPERVISED_MOMENTUM, adam_betas
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.environments import trl_python
from tests.support.learner_cases import FILES, VOCAB, folder, fresh, quiet, save_models, shake
from tests.support.live_server import REPO
from tests.support.preference_cases import OfCore, make_pairs, prefer
from tests.support.soak import count, in_soak, share

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


def run_trl(program: str, *arguments: object) -> None:
    done = subprocess.run(
        [trl_python(), REPO / "tests/support" / program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]


def apart_and_moved(theirs: Path, ours: Path) -> tuple[float, float]:
    """Largest difference of a weight between the two, and between ours and the beginning."""
    first, got = load_file(theirs / FILES[1]), load_file(ours / FILES[1])
    wanted = load_file(theirs / "after.safetensors")
    assert wanted.keys() == got.keys() and {t.dtype for t in wanted.values()} == {torch.float32}
    apart, moved = (
        max((got[name] - other[name]).abs().max().item() for name in got)
        for other in (wanted, first)
    )
    return apart, moved


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(600)  # the environment is made once
def test_steps_by_rewards_are_those_of_trl(tmp_path: Path) -> None:
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
    run_trl("trl_grpo.py", tmp_path)
    found: dict[str, float] = {}
    for case, mine in zip(told, ours, strict=True):
        where = Path(case["adapter"])
        apart, moved = apart_and_moved(where, mine)
        assert moved > RATE
        found[f"{where.name}: {case['settings']['loss_type']}"] = apart / moved
    assert max(found.values()) <= TOLERANCE, found


@in_soak  # `test_preference` has the paper's loss in float64
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_five_preference_steps_are_those_of_trl(tiny: str, tmp_path: Path) -> None:
    config = PreferenceConfig(learning_rate=5e-3, beta=0.3, max_grad_norm=MOST_NORM)
    core, pairs = LearnerCore(tiny), make_pairs(6, seed=11)
    parent = start = fresh(core, tmp_path)
    found: list[dict[str, float]] = []
    for step in range(1, 6):
        out = folder(tmp_path, f"ours{step}")
        found.append(await prefer(OfCore(core), parent, out, step, pairs, config))
        parent = out
    theirs = tmp_path / "theirs"
    shutil.copytree(start, theirs)
    sides = [(pair.chosen[0], pair.rejected[0]) for pair in pairs]
    told = {
        "pairs": [{"prompt": c[0], "chosen": c[1], "rejected": r[1]} for c, r in sides],
        "steps": 5,
        "vocab": VOCAB,
        "betas": adam_betas(SUPERVISED_MOMENTUM),
        "eps": ADAM_EPS,
        **config.model_dump(include={"beta", "learning_rate", "max_grad_norm"}),
    }
    (theirs / "told.json").write_text(json.dumps(told))
    run_trl("trl_dpo.py", theirs, tiny)
    losses, norms = ([one[name] for one in found] for name in ("loss", "grad_norm"))
    assert losses == pytest.approx(json.loads((theirs / "losses.json").read_text()), abs=TOLERANCE)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < 0.5
    assert min(norms) < MOST_NORM < max(norms), "some gradients are cut, and some are not"
    apart, moved = apart_and_moved(theirs, parent)
    assert apart <= TOLERANCE < 0.01 < moved
