"""What the embedded learner's core promises, on tiny random models."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire import Distillation, KLPenalty, LoraConfig, LRSchedule, TrainConfig
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.learner_cases import (
    FILES,
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


def test_a_zero_advantage_changes_nothing_even_with_momentum(tiny: str, tmp_path: Path) -> None:
    core = LearnerCore(tiny)
    start, rows = fresh(core, tmp_path), make_rows(6)
    silent = [replace(row, advantages=[0.0] * len(row.mask)) for row in rows]
    one, two, three = (folder(tmp_path, name) for name in ("one", "two", "three"))
    take(core, start, one, rows)
    metrics = take(core, one, two, silent, step=2, optimizer_steps=3)
    assert contents(two) == contents(one)
    assert contents(one)[FILES[1]] != contents(start)[FILES[1]]
    assert metrics["grad_norm"] == 0.0 and metrics["loss"] == 0.0
    take(core, start, three, silent)
    assert contents(three)[FILES[1]] == contents(start)[FILES[1]]


def test_a_fresh_adapter_equals_the_base_and_its_seed_decides_it(tiny: str, tmp_path: Path) -> None:
    core = LearnerCore(tiny)
    rows = make_rows(5, low=1)
    zero, again = fresh(core, tmp_path), fresh(core, tmp_path)
    other = fresh(core, tmp_path, LORA.model_copy(update={"seed": 1}))
    for own, base in zip(core.logprobs(zero, rows), core.logprobs(None, rows), strict=True):
        assert own.tolist() == base.tolist()
        assert own[0] == 0.0
    assert contents(zero) == contents(again)
    assert contents(zero)[FILES[1]] != contents(other)[FILES[1]]
    assert sorted(contents(zero)) == sorted(FILES[:2])
    config = json.loads((zero / FILES[0]).read_text())
    assert config["base_model_name_or_path"] == tiny and config["bias"] == "none"
    assert "lm_head" not in config["target_modules"] and len(config["target_modules"]) == 7
    first = load_file(zero / FILES[1])
    a = [tensor for name, tensor in first.items() if "lora_A" in name]
    # Kaiming-uniform with a = √5 is uniform in ±1/√fan_in.
    assert len(a) == 14 and all(0.9 < t.abs().max() * math.sqrt(t.shape[1]) <= 1.0 for t in a)


def test_save_and_load_reproduce_logprobs_exactly_here_and_in_peft(
    tiny: str, tmp_path: Path
) -> None:
    core = LearnerCore(tiny)
    start, rows = fresh(core, tmp_path), make_rows(6)
    out = folder(tmp_path, "out")
    take(core, start, out, rows)
    held = core.logprobs(out, rows)
    loaded = LearnerCore(tiny).logprobs(out, rows)
    assert [h.tolist() for h in held] == [x.tolist() for x in loaded]
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, str(out)).eval()
    for row, own in zip(rows, held, strict=True):
        with torch.no_grad():
            logits_TV = model(torch.tensor([row.token_ids])).logits[0, :-1]
        theirs_T = logits_TV.log_softmax(-1)[range(len(own) - 1), row.token_ids[1:]]
        assert own[1:].tolist() == pytest.approx(theirs_T.tolist(), abs=1e-5)
    assert any(
        own.tolist() != b.tolist() for own, b in zip(held, core.logprobs(None, rows), strict=True)
    )


#: float16 has what float32 and bfloat16 have, parameters in float32, and a loss scale.
of_kinds = pytest.mark.parametrize("kind", ["float16", "8 bits"])


def learner(kind: str, model: str) -> LearnerCore:
    if kind == "8 bits":
        pytest.importorskip("bitsandbytes")
        return LearnerCore(model, optimizer="adamw_8bit")
    return LearnerCore(model, dtype=kind)


@of_kinds
def test_memory_and_disk_give_the_same_bits(kind: str, tiny: str, tmp_path: Path) -> None:
    """Also after a rename, and with another adapter in between, as a teacher's."""
    core, first = learner(kind, tiny), tmp_path
    other = shake(fresh(core, tmp_path, LoraConfig(rank=2, alpha=4.0)))
    kept, original, loads = fresh(core, tmp_path), core._put_on, list[bytes]()

    def counted(config: bytes) -> None:
        loads.append(config)
        original(config)

    core._put_on = counted  # type: ignore[method-assign]
    for step in range(1, 4):
        rows = make_rows(8, seed=step)
        staged, again = folder(tmp_path, f"staged{step}"), folder(tmp_path, f"again{step}")
        take(core, kept, staged, rows, step)
        take(learner(kind, tiny), kept, again, rows, step)
        assert contents(staged) == contents(again)
        kept = staged.rename(tmp_path / f"kept{step}")  # as a publisher does
        if step == 1:
            first = kept
        if step == 2:
            assert len(loads) == 1, "only version 0 was read"
            with core._bearing(other):
                pass
    rows, config = make_rows(6), TrainConfig(learning_rate=1e-2, **LENIENT)
    restarted, stateless, going = (folder(tmp_path, n) for n in ("restarted", "stateless", "going"))
    core.step(LearnerStep(first, restarted, 1, rows, config, fresh_optimizer=True), quiet)
    take(core, first, going, rows)
    (first / FILES[2]).unlink()  # a fresh optimizer leaves the parent's state unread
    take(learner(kind, tiny), first, stateless, rows)
    assert contents(restarted) == contents(stateless) != contents(going)
    state = load_file(kept / FILES[2])
    assert {int(t) for name, t in state.items() if name.endswith(".step")} == {3}
    moments = {t.dtype for name, t in state.items() if not name.endswith(".step")}
    assert moments == {torch.uint8, torch.float32} if kind == "8 bits" else {torch.float32}
    assert {t.dtype for t in load_file(kept / FILES[1]).values()} == {torch.float32}


def test_a_path_that_was_used_before_is_read_again(tiny: str, tmp_path: Path) -> None:
    core, rows = LearnerCore(tiny), make_rows(6)
    start = fresh(core, tmp_path)
    one, two, reference = (folder(tmp_path, name) for name in ("one", "two", "reference"))
    take(core, start, one, rows)
    shutil.rmtree(one)
    shutil.copytree(start, one)
    take(core, one, two, rows)
    take(core, start, reference, rows)
    assert contents(two) == contents(reference)


@pytest.mark.parametrize("cause", ["ratio", "parent", "result"])
def test_a_step_that_is_not_finite_is_refused_and_leaves_no_trace(
    cause: str, tiny: str, tmp_path: Path
) -> None:
    core, rows = LearnerCore(tiny), make_rows(6)
    start = fresh(core, tmp_path)
    one, bad, two, reference = (folder(tmp_path, n) for n in ("one", "bad", "two", "reference"))
    take(core, start, one, rows)
    before, parent, batch, words = contents(one), one, rows, "not finite"
    if cause == "ratio":  # e^1000 times a negative advantage: the loss is infinite
        wild = replace(rows[0], logprobs=[-1000.0] * len(rows[0].mask))
        batch = [*rows[1:], replace(wild, advantages=[-1.0] * len(wild.mask))]
        words = r"refused.*(nan|inf)"
    elif cause == "parent":
        parent, words = folder(tmp_path, "parent"), "'parent' holds numbers that are not"
        shutil.copytree(one, parent, dirs_exist_ok=True)
        tensors = load_file(one / FILES[1])
        next(iter(tensors.values()))[0, 0] = math.nan
        save_file(tensors, parent / FILES[1])
    else:  # what is in memory is not the parent any more

        def overflow(*_: Any) -> None:
            with torch.no_grad():
                next(iter(core.parameters.values())).fill_(math.inf)

        core._hold(one)
        core._optimizer.step = overflow  # type: ignore[method-assign]
    with pytest.raises(ArtError, match=words):
        # of all losses this one has the sampler in its ratio
        take(core, parent, bad, batch, 2, tokens_per_microbatch=64, loss="dppo_tv")
    assert contents(bad) == {} and contents(one) == before
    take(core, one, two, rows, 2)
    take(LearnerCore(tiny), one, reference, rows, 2)
    assert contents(two) == contents(reference)


def test_unknown_targets_are_refused_with_the_names_that_exist(tiny: str, tmp_path: Path) -> None:
    core = LearnerCore(tiny)
    far = ("q_proj", "model.layers.70.self_attn.q_proj")
    for targets in (("q_proj", "nonsense"), ("embed_tokens",), ("self_attn",), (), far):
        with pytest.raises(ConfigError, match=r"down_proj.*q_proj"):
            core.init_adapter(tmp_path, LoraConfig(targets=targets))
    assert list(tmp_path.iterdir()) == []


def test_broken_adapters_are_refused(tiny: str, tmp_path: Path) -> None:
    core, rows = LearnerCore(tiny), make_rows(2)
    good, out = fresh(core, tmp_path), folder(tmp_path, "out")
    take(core, good, out, rows)
    for name, file, body in (
        ("cut", FILES[1], b"12"),
        ("other-keys", FILES[1], save({"x": torch.zeros(2)})),
        ("other-state", FILES[2], save({"x.step": torch.zeros(())})),
    ):
        broken = shutil.copytree(out, tmp_path / name)
        (broken / file).write_bytes(body)
        with pytest.raises(ConfigError):
            core.logprobs(broken, rows)
    assert core.logprobs(out, rows)[0][1] < 0


def test_metrics_and_progress_count_right(tiny: str, tmp_path: Path) -> None:
    core = LearnerCore(tiny)
    start, rows = fresh(core, tmp_path), make_rows(12)
    silent = replace(rows[0], mask=[0] * len(rows[0].mask))
    seen: list[tuple[float, str]] = []
    own: dict[str, Any] = {"optimizer_steps": 2, "tokens_per_microbatch": 64}
    own |= {"schedule": LRSchedule(warmup_steps=4), "max_logprob_gap": None}
    config = TrainConfig(learning_rate=1e-3, **own)
    step = LearnerStep(start, folder(tmp_path, "out"), 1, [*rows, silent], config)
    metrics = core.step(step, lambda fraction, message: seen.append((fraction, message)))
    assert set(metrics) == {
        *("loss", "grad_norm", "learning_rate", "ratio_mean", "ratio_max_dev"),
        *("clip_low_fraction", "clip_high_fraction", "logprob_gap_mean", "logprob_gap_max", "kl"),
        *("importance_mean", "importance_ess", "importance_limited_fraction"),
        *("guarded_fraction", "kl_reference", "entropy"),
        *("tokens_trained", "tokens_processed", "forest", "checkpointed", "rows"),
        *("updates", "seconds", "save_seconds", "kl_seconds", "cpu_seconds"),
        *("step_kl", "step_kl_error", "step_kept"),
    }
    assert all(math.isfinite(v) for v in metrics.values())
    assert metrics["rows"] == 12
    assert metrics["tokens_trained"] == 2 * sum(sum(row.mask) for row in rows)
    assert metrics["forest"] == 1.0
    assert metrics["tokens_processed"] == 2 * sum(len(row.token_ids) - 1 for row in rows)
    assert metrics["learning_rate"] == 2.5e-4
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions) and fractions[0] == 0.0 and len(fractions) >= 5
    assert fractions[-1] < 1.0  # each was told before what it names, the last one, too
    assert seen[0][1].startswith("update 1, micro-batch 1 of ")
    assert seen[-1][1] == "measuring how far the step has moved the policy"


def test_each_pass_of_a_step_tells_its_micro_batches(tiny: str, tmp_path: Path) -> None:
    """A learner that tells none for `hang_seconds` is ended."""
    core, told = LearnerCore(tiny), list[str]()
    start, rows = fresh(core, tmp_path), make_rows(40)

    def tell(_fraction: float, message: str) -> None:
        told.append(message)

    kl = KLPenalty(estimator="k2", coefficient=0.1)
    changes: dict[str, Any] = LENIENT | {"max_kl": 1e-4, "tokens_per_microbatch": 64, "kl": kl}
    config = TrainConfig(learning_rate=1e-2, **changes)
    core.step(LearnerStep(start, folder(tmp_path, "out"), 1, rows, config), tell)
    count = int(told[0].rpartition(" ")[2])
    parts = [f"micro-batch {index} of {count}" for index in range(1, count + 1)]
    assert told[:count] == [f"reference, {part}" for part in parts] and count > 1
    assert told[count : 2 * count] == [f"update 1, {part}" for part in parts]
    measured = told[2 * count :]
    assert set(measured) == {"measuring how far the step has moved the policy"}
    assert len(measured) > count and len(measured) % count == 0  # once and again
    told.clear()
    core.logprobs(start, make_rows(600), tell)
    assert len(told) > 1


def test_what_cannot_be_loaded_is_refused(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can not be loaded"):
        LearnerCore(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="float8"):
        LearnerCore(tiny, dtype="float8_e4m3fn")
    with pytest.raises(ConfigError, match="abacus"):
        LearnerCore(tiny, device="abacus")


# --- a teacher whose LoRA has another shape than its student's: it is scored as it is ------------

TAUGHT = TrainConfig(
    learning_rate=1e-2,
    distillation=Distillation(teacher="t@1"),
    optimizer_steps=2,
    **LENIENT,
)


def adam_state(core: LearnerCore) -> list[dict[str, Any]]:
    """The optimizer's state of each parameter."""
    states = core._optimizer.state_dict()["state"].values()
    return [{key: value.tolist() for key, value in state.items()} for state in states]


@pytest.mark.parametrize("shape", [{}, {"rank": 8}, {"targets": ("q_proj",)}], ids=str)
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
    found_N = core.batch(rows, TAUGHT, teacher).loss.reference_logprobs_N
    assert found_N is not None
    np.testing.assert_allclose(found_N.numpy(), expected, atol=1e-5)
    assert {n: p.tolist() for n, p in core.parameters.items()} == held and len(student) == len(held)
    assert adam_state(core) == moments and len(moments) == len(held)

    # The step is that of a learner which has never scored another adapter, and so is the next.
    metrics: list[dict[str, float]] = []
    for name, learner in (("once", core), ("again", LearnerCore(tiny))):
        two, three = folder(tmp_path, f"{name}-2"), folder(tmp_path, f"{name}-3")
        step = LearnerStep(start, two, 2, rows, TAUGHT, reference=teacher)
        metrics.append(learner.step(step, quiet))
        take(learner if name == "once" else LearnerCore(tiny), two, three, rows, 3)
    for made in (2, 3):
        once, again = (contents(tmp_path / f"{name}-{made}") for name in ("once", "again"))
        assert once == again
        assert once["adapter_config.json"] == contents(start)["adapter_config.json"]
    assert metrics[0]["kl_reference"] == metrics[1]["kl_reference"] > 0.01


def test_gradient_checkpointing_stays_on_where_a_teacher_is_scored(
    tiny: str, tmp_path: Path
) -> None:
    core = LearnerCore(tiny)
    own = fresh(core, tmp_path)
    teacher = shake(fresh(core, tmp_path, LORA.model_copy(update={"rank": 2 * LORA.rank})))
    core._hold(own)
    core.packer._most_bytes = 1.0  # memory is short
    core.batch(make_rows(4), TAUGHT, teacher)
    layers = [one for one in core.base.modules() if isinstance(one, GradientCheckpointingLayer)]
    assert core.packer.checkpoints and layers and all(one.training for one in layers)
