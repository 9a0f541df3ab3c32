"""A teacher whose LoRA has another shape than its student's: it is scored as it is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.modeling_layers import GradientCheckpointingLayer

from langchain_art.wire import Distillation, TrainConfig
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.learner_cases import (
    LENIENT,
    LORA,
    branching_rows,
    contents,
    folder,
    fresh,
    make_rows,
    on_policy,
    quiet,
    shake,
    take,
)

CONFIG = TrainConfig(
    learning_rate=1e-2,
    distillation=Distillation(teacher="t@1"),
    optimizer_steps=2,
    **LENIENT,
)
SHAPES: list[dict[str, Any]] = [{}, {"rank": 8}, {"alpha": 32.0}, {"targets": ("q_proj",)}]


def adam_state(core: LearnerCore) -> list[dict[str, Any]]:
    """The optimizer's state of each parameter."""
    states = core._optimizer.state_dict()["state"].values()
    return [{key: value.tolist() for key, value in state.items()} for state in states]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_teacher_is_scored_with_its_own_shape(
    shape: dict[str, Any], tiny: str, tmp_path: Path
) -> None:
    core = LearnerCore(tiny)
    first = shake(fresh(core, tmp_path))
    rows = on_policy(core, first, make_rows(6) + branching_rows(6))
    start = folder(tmp_path, "start")
    take(core, first, start, rows)  # Adam has a state
    teacher = shake(fresh(core, tmp_path, LORA.model_copy(update=shape)), scale=0.2)
    scored = LearnerCore(tiny).logprobs(teacher, rows)
    expected = np.concatenate(
        [own_T[np.asarray(row.mask) == 1] for own_T, row in zip(scored, rows, strict=True)]
    )
    core.logprobs(start, rows)  # holds the student
    student, held = core.parameters, {n: p.tolist() for n, p in core.parameters.items()}
    moments = adam_state(core)
    found_N = core.batch(rows, CONFIG, teacher).loss.reference_logprobs_N
    assert found_N is not None
    np.testing.assert_allclose(found_N.numpy(), expected, atol=1e-5)
    assert {n: p.tolist() for n, p in core.parameters.items()} == held and len(student) == len(held)
    assert adam_state(core) == moments and len(moments) == len(held)

    # The step is that of a learner which has never scored another adapter, and so is the next.
    metrics: list[dict[str, float]] = []
    for name, learner in (("once", core), ("again", LearnerCore(tiny))):
        two, three = folder(tmp_path, f"{name}-2"), folder(tmp_path, f"{name}-3")
        step = LearnerStep(start, two, 2, rows, CONFIG, reference=teacher)
        metrics.append(learner.step(step, quiet))
        take(learner if name == "once" else LearnerCore(tiny), two, three, rows, 3)
    for made in (2, 3):
        once, again = (contents(tmp_path / f"{name}-{made}") for name in ("once", "again"))
        assert once == again
        assert once["adapter_config.json"] == contents(start)["adapter_config.json"]
    assert metrics[0]["kl_reference"] == metrics[1]["kl_reference"] > 0.01


@pytest.mark.parametrize("rank", [LORA.rank, 2 * LORA.rank])
def test_gradient_checkpointing_stays_on_where_a_teacher_is_scored(
    rank: int, tiny: str, tmp_path: Path
) -> None:
    core = LearnerCore(tiny)
    own = fresh(core, tmp_path)
    teacher = shake(fresh(core, tmp_path, LORA.model_copy(update={"rank": rank})))
    core._hold(own)
    core.packer._most_bytes = 1.0  # memory is short
    core.batch(make_rows(4), CONFIG, teacher)
    layers = [one for one in core.base.modules() if isinstance(one, GradientCheckpointingLayer)]
    assert core.packer.checkpoints and layers and all(one.training for one in layers)
