"""What the embedded learner's core promises beyond the protocol."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from langchain_art.errors import ArtError, ConfigError, InvalidRequest
from langchain_art.wire import KLPenalty, LoraConfig, LRSchedule, TrainConfig
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.ipc.step_codec import read_rows, write_rows
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
    restricted,
    shake,
    take,
)


def test_memory_and_disk_give_the_same_bits_also_after_a_rename(tiny: str, tmp_path: Path) -> None:
    core = LearnerCore(tiny)
    kept = read_again = fresh(core, tmp_path)
    loads = 0
    original = core._put_on

    def counted(config: bytes) -> None:
        nonlocal loads
        loads += 1
        original(config)

    core._put_on = counted  # type: ignore[method-assign]
    for step in range(1, 6):
        rows = make_rows(8, seed=step)
        staged, out = folder(tmp_path, f"staged{step}"), tmp_path / f"kept{step}"
        take(core, kept, staged, rows, step)
        kept = staged.rename(out)  # as a publisher does
        again = folder(tmp_path, f"again{step}")
        take(LearnerCore(tiny), read_again, again, rows, step)
        read_again = again
        assert contents(kept) == contents(again)
    assert loads == 1  # only version 0 was read
    state = load_file(kept / FILES[2])
    assert {t.dtype for t in state.values()} == {torch.float32}
    assert {int(t) for name, t in state.items() if name.endswith(".step")} == {5}


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


def test_a_fresh_optimizer_leaves_the_parents_state_unread(tiny: str, tmp_path: Path) -> None:
    core, rows = LearnerCore(tiny), make_rows(6)
    one, kept, fresh_one, stateless = (
        folder(tmp_path, name) for name in ("one", "kept", "fresh", "stateless")
    )
    take(core, fresh(core, tmp_path), one, rows)
    take(core, one, kept, rows)
    config = TrainConfig(learning_rate=1e-2, **LENIENT)
    step = LearnerStep(one, fresh_one, 1, rows, config, fresh_optimizer=True)
    core.step(step, quiet)
    (one / FILES[2]).unlink()
    take(LearnerCore(tiny), one, stateless, rows)
    assert contents(fresh_one) == contents(stateless)
    assert contents(fresh_one) != contents(kept)


def test_adapters_of_different_shapes_take_turns(tiny: str, tmp_path: Path) -> None:
    core, rows = LearnerCore(tiny), make_rows(4)
    shapes = [LORA, LoraConfig(rank=2, targets=("q_proj", "down_proj")), LORA]
    starts = [shake(fresh(core, tmp_path, shape)) for shape in shapes[:2]]
    starts.append(starts[0])
    results = [[p.tolist() for p in core.logprobs(start, rows)] for start in starts]
    assert results[0] == results[2] != results[1]
    fresh_core = [p.tolist() for p in LearnerCore(tiny).logprobs(starts[1], rows)]
    assert results[1] == fresh_core
    assert len(load_file(starts[1] / FILES[1])) == 2 * 2 * 2
    assert core.info["parameters"] == LearnerCore(tiny).info["parameters"]


@pytest.mark.parametrize("cause", ["ratio", "parent"])
def test_a_step_that_is_not_finite_is_refused_and_leaves_no_trace(
    cause: str, tiny: str, tmp_path: Path
) -> None:
    core, rows = LearnerCore(tiny), make_rows(6)
    start = fresh(core, tmp_path)
    one, bad, two, reference = (folder(tmp_path, n) for n in ("one", "bad", "two", "reference"))
    take(core, start, one, rows)
    before = contents(one)
    if cause == "ratio":  # e^1000 times a negative advantage: the loss is infinite
        wild = replace(rows[0], logprobs=[-1000.0] * len(rows[0].mask))
        wild = replace(wild, advantages=[-1.0] * len(wild.mask))
        parent, batch = one, [*rows[1:], wild]
    else:
        parent, batch = folder(tmp_path, "parent"), rows
        shutil.copytree(one, parent, dirs_exist_ok=True)
        tensors = load_file(one / FILES[1])
        next(iter(tensors.values()))[0, 0] = math.nan
        save_file(tensors, parent / FILES[1])
    words = r"refused.*(nan|inf)" if cause == "ratio" else "'parent' holds numbers that are not"
    with pytest.raises(ArtError, match=words):
        # of all losses this one has the sampler in its ratio
        take(core, parent, bad, batch, 2, tokens_per_microbatch=64, loss="dppo_tv")
    assert contents(bad) == {} and contents(one) == before
    take(core, one, two, rows, 2)
    take(LearnerCore(tiny), one, reference, rows, 2)
    assert contents(two) == contents(reference)


def test_a_result_that_is_not_finite_is_not_written(tiny: str, tmp_path: Path) -> None:
    core = LearnerCore(tiny)
    start, out = fresh(core, tmp_path), folder(tmp_path, "out")
    step = LearnerStep(
        start, out, 1, on_policy(core, start, make_rows(3)), TrainConfig(learning_rate=2e-5)
    )
    optimizer = core._optimizer

    def overflow(*_: Any) -> None:
        with torch.no_grad():
            next(iter(core.parameters.values())).fill_(math.inf)

    optimizer.step = overflow  # type: ignore[method-assign]
    with pytest.raises(ArtError, match="not finite"):
        core.step(step, quiet)
    assert contents(out) == {}
    reference = folder(tmp_path, "reference")
    core.step(step, quiet)  # what is in memory is not the parent any more: it is read again
    LearnerCore(tiny).step(replace(step, out=reference), quiet)
    assert contents(out) == contents(reference)


def test_unknown_targets_are_refused_with_the_names_that_exist(tiny: str, tmp_path: Path) -> None:
    core = LearnerCore(tiny)
    unknown = ("nonsense",), ("q_proj", "nonsense"), ("embed_tokens",), ("self_attn",), ()
    far = ("q_proj", "model.layers.70.self_attn.q_proj"), ("q_proj", "self_atn.v_proj")
    for targets in (*unknown, *far):
        with pytest.raises(ConfigError, match=r"down_proj.*q_proj"):
            core.init_adapter(tmp_path, LoraConfig(targets=targets))
    assert list(tmp_path.iterdir()) == []


def test_broken_adapters_are_refused(tiny: str, tmp_path: Path) -> None:
    core, rows = LearnerCore(tiny), make_rows(2)
    good, out = fresh(core, tmp_path), folder(tmp_path, "out")
    take(core, good, out, rows)

    def damaged(name: str, damage: Callable[[Path], None]) -> Path:
        where = tmp_path / name
        shutil.copytree(out, where)
        damage(where)
        return where

    def other_keys(where: Path) -> None:
        save_file({"x": torch.zeros(2)}, where / FILES[1])

    def other_state(where: Path) -> None:
        save_file({"x.step": torch.zeros(())}, where / FILES[2])

    cases = [
        damaged("no-config", lambda where: (where / FILES[0]).unlink()),
        damaged("no-weights", lambda where: (where / FILES[1]).unlink()),
        damaged("cut", lambda where: (where / FILES[1]).write_bytes(b"12")),
        damaged("odd-config", lambda where: (where / FILES[0]).write_text('{"rr": 1}')),
        damaged("other-keys", other_keys),
        damaged("other-state", other_state),
    ]
    for broken in cases:
        with pytest.raises(ConfigError):
            core.logprobs(broken, rows)
    assert core.logprobs(out, rows)[0][1] < 0


def test_a_bfloat16_base_learns_in_float32(tiny: str, tmp_path: Path) -> None:
    core = LearnerCore(tiny, dtype="bfloat16")
    start, out = fresh(core, tmp_path), folder(tmp_path, "out")
    rows = on_policy(core, start, make_rows(6))
    take(core, start, out, rows, learning_rate=1e-6)
    for name in FILES[1:]:
        assert {t.dtype for t in load_file(out / name).values()} == {torch.float32}
    changed = load_file(out / FILES[1])
    before = load_file(start / FILES[1])
    assert any(not torch.equal(changed[k], before[k]) for k in before if "lora_B" in k)
    assert {p.dtype for p in core.base.get_input_embeddings().parameters()} == {torch.bfloat16}


def test_metrics_are_complete_and_count_right(tiny: str, tmp_path: Path) -> None:
    core = LearnerCore(tiny)
    start, rows = fresh(core, tmp_path), make_rows(12)
    silent = replace(rows[0], mask=[0] * len(rows[0].mask))
    seen: list[tuple[float, str]] = []
    step = LearnerStep(
        start,
        folder(tmp_path, "out"),
        1,
        [*rows, silent],
        TrainConfig(
            optimizer_steps=2,
            tokens_per_microbatch=64,
            learning_rate=1e-3,
            schedule=LRSchedule(warmup_steps=4),
            max_logprob_gap=None,
        ),
    )
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
    own = [p for r in core.logprobs(start, rows) for p in r[1:]]
    said = [
        p
        for row, found in zip(rows, core.logprobs(start, rows), strict=True)
        for p, counts in zip(found, row.mask, strict=True)
        if counts
    ]
    assert metrics["entropy"] == pytest.approx(-sum(said) / len(said), rel=1e-5)
    gaps = [
        abs(p - row.logprobs[i + 1])
        for row, r in zip(rows, core.logprobs(start, rows), strict=True)
        for i, p in enumerate(r[1:])
        if row.mask[i + 1]
    ]
    assert len(own) > len(gaps)
    assert metrics["logprob_gap_max"] == pytest.approx(max(gaps), rel=1e-4)
    assert metrics["logprob_gap_mean"] == pytest.approx(math.fsum(gaps) / len(gaps), rel=1e-4)
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


def test_rows_survive_their_file_exactly(tmp_path: Path) -> None:
    rows = [*make_rows(20, low=1), *make_rows(3, temperature=0.1), *branching_rows(5)]
    rows += [replace(row, weights=[0.1 * p for p in row.logprobs]) for row in rows]
    rows += restricted(rows[:9])
    write_rows(tmp_path / "rows", rows)
    assert read_rows(tmp_path / "rows") == rows
    (tmp_path / "rows").write_bytes(b"not a zip")
    with pytest.raises(InvalidRequest):
        read_rows(tmp_path / "rows")
