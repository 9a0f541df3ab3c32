"""The learner's gradient and logits against naive computations, over architectures and forests."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_art.wire import GSPO, ClippedRatio, JobConfig, SFTConfig, TrainConfig
from langchain_art_server.algorithms.sequences.prefix_forest import PartCosts
from langchain_art_server.algorithms.sequences.token_sets import mask_of
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.models.base_weights import load_causal
from langchain_art_server.backends.peft import logprob_scoring
from langchain_art_server.backends.peft.forest import attention_tiles
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.logprob_scoring import CountedTokens
from langchain_art_server.backends.peft.training_batch import TrainingBatch
from tests.support.learner_cases import (
    branching_rows,
    drawn_from,
    fresh,
    gradients_of,
    jittered,
    long_runs,
    make_rows,
    naive_gradients,
    naive_model,
    on_policy,
    quiet,
    restricted,
    shake,
    worst_error,
)
from tests.support.soak import count, in_soak_alone

PLAIN = TrainConfig(
    loss=ClippedRatio(importance_sampling=None, dual_clip=None),
    guard=None,
    tokens_per_microbatch=64,
)

ANY = [PLAIN, PLAIN.model_copy(update={"loss": GSPO(importance_sampling=None)}), SFTConfig()]


def naive_gradient(
    model_path: str, adapter: Path, rows: list[Row], config: JobConfig
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss in float64: row by row, unpadded, eager attention, one token at a time."""
    model = naive_model(model_path, adapter)
    n, total = sum(sum(row.mask) for row in rows), torch.zeros((), dtype=torch.float64)
    for row in rows:
        logits_TV = model(torch.tensor([row.token_ids])).logits[0]
        log_ratios: dict[int, torch.Tensor] = {}
        for t in range(1, len(row.token_ids)):
            if row.mask[t]:
                z_V = logits_TV[t - 1] / row.temperature
                allowed_V = torch.ones_like(z_V, dtype=torch.bool)
                if row.drawn_from:
                    allowed_V = torch.from_numpy(mask_of(row.drawn_from[t], len(z_V)))
                new = z_V[row.token_ids[t]] - torch.log(torch.exp(z_V[allowed_V]).sum())
                log_ratios[t] = new - row.logprobs[t]
        for t, log_ratio in log_ratios.items():
            if isinstance(config, SFTConfig):
                weight = row.weights[t] if row.weights else 1 / n
                total = total - weight * (log_ratio + row.logprobs[t])
                continue
            if isinstance(config.loss, GSPO):
                same = [r for u, r in log_ratios.items() if row.calls[u] == row.calls[t]]
                log_ratio = torch.stack(same).mean()
            ratio = torch.exp(log_ratio)
            bound = min(max(ratio.item(), 1 - config.loss.clip_low), 1 + config.loss.clip_high)
            a, w = row.advantages[t], row.weights[t] if row.weights else 1 / n
            total = total - w * (ratio * a if ratio.item() * a <= bound * a else bound * a)
    if total.requires_grad:
        total.backward()
    return total.item(), naive_gradients(model)


def second_update(core: LearnerCore, rows: list[Row], config: JobConfig) -> TrainingBatch:
    """A batch whose first update was taken where the rows' logprobs are from: the clip acts."""
    batch = core.batch(rows, config)
    batch.loss.begin_update()
    batch.loss.old_logprobs_N[:] = torch.tensor(
        [p for row in rows for p, m in zip(row.logprobs, row.mask, strict=True) if m],
        dtype=torch.float64,
    )
    return batch


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("beside", "parents"), [(40.0, {-1, 0}), in_soak_alone(500.0, {-1})])
def test_parts_with_copies_have_the_naive_gradient(
    beside: float, parents: set[int], tiny: str, tmp_path: Path
) -> None:
    """As a GPU's costs make them, with a trunk and without one; norms and MLPs compute again."""
    core = LearnerCore(tiny, dtype="float64")
    adapter = shake(fresh(core, tmp_path))
    core.packer.token_cost, core.packer.costs = math.inf, PartCosts(0.0, beside, 1.0)
    rows = restricted(jittered(on_policy(core, adapter, long_runs(6, 4, 60)), 0.4))
    core._hold(adapter)
    batch = second_update(core, rows, PLAIN.model_copy(update={"tokens_per_microbatch": 300}))
    core.packer.recompute.on = True
    loss, _ = core.accumulate(batch, quiet)
    parts: Any = batch.packing
    assert {part.parent for part in parts._batches} == parents and parts.alive <= 300
    core.packer.costs = PartCosts()
    assert parts.tokens > core.packer.pack(rows, CountedTokens.of(rows), 300).tokens
    expected_loss, expected = naive_gradient(tiny, adapter, rows, PLAIN)
    assert loss == pytest.approx(expected_loss, rel=1e-9)
    assert worst_error(core, expected) < 1e-9


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        *((kind, "float64", 1e-9) for kind in ("forest", "apart", "restricted")),
        ("restricted", "float32", 1e-5),
        *(in_soak_alone(kind, "float32", 1e-5) for kind in ("forest", "apart")),
    ],
)
def test_the_gradient_equals_a_naive_float64_computation(
    kind: str,
    dtype: str,
    tolerance: float,
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "forest":  # logits in chunks of three
        monkeypatch.setattr(logprob_scoring, "CHUNK_ELEMENTS", 3 * 64)
    core = LearnerCore(tiny, dtype=dtype)
    adapter = shake(fresh(core, tmp_path))
    make = make_rows if kind == "apart" else branching_rows
    rows = make(8, seed=1, temperature=0.7) + make(7, seed=2)
    if kind == "restricted":  # the same tokens at the same places, drawn from different sets
        rows = restricted(rows[4:], 1) + restricted(rows[:11], 2) + rows[:2]
    rows = jittered(on_policy(core, adapter, rows), 0.4)
    core._hold(adapter)
    batch = second_update(core, rows, PLAIN)
    loss, stats = core.accumulate(batch, quiet)
    expected_loss, expected = naive_gradient(tiny, adapter, rows, PLAIN)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert worst_error(core, expected) < tolerance
    metrics = stats.metrics()
    if kind != "restricted":
        assert 0.02 < metrics["clip_low_fraction"] < 0.5
        assert 0.02 < metrics["clip_high_fraction"] < 0.5
    assert stats.tokens == sum(sum(row.mask) for row in rows)
    shown = sum(len(row.token_ids) - 1 for row in rows)
    assert batch.packing.tokens <= shown * (1.0 if kind == "apart" else 0.8)


@st.composite
def forests(draw: st.DrawFn) -> list[Row]:
    """Rows that fork from earlier ones, with calls that end where they like; few token ids."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 7))):
        ids: list[int] = []
        if rows and draw(st.integers(0, 3)):
            parent = draw(st.sampled_from(rows)).token_ids
            ids = parent[: draw(st.integers(0, len(parent)))]
        ids = ids + draw(st.lists(st.integers(0, 5), min_size=0 if len(ids) > 1 else 2, max_size=9))
        rest = len(ids) - 1
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=rest, max_size=rest))]
        calls, call = [], 0
        for trained in mask:
            calls.append(call if trained else -1)
            call += draw(st.integers(0, 3)) == 0
        number = st.floats(-1, 1)
        rng = draw(st.randoms(use_true_random=False))
        rows.append(
            Row(
                token_ids=ids,
                mask=mask,
                logprobs=[draw(st.floats(-6, -2)) * m for m in mask],
                advantages=[draw(number) * m for m in mask],
                temperature=draw(st.sampled_from([1.0, 0.5])),
                weights=[draw(number) * m for m in mask],
                calls=calls,
                drawn_from=draw(st.sampled_from([[], [drawn_from(rng, token) for token in ids]])),
            )
        )
    return rows


@pytest.fixture(scope="module", params=[in_soak_alone("qwen3"), "mistral"])
def double(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, LearnerCore, Path]:
    """A model in float64, its learner, an adapter; the second one's layers have windows."""
    core = LearnerCore(str(models[request.param]), dtype="float64")
    folder = tmp_path_factory.mktemp("double")
    return str(models[request.param]), core, shake(fresh(core, folder))


@pytest.mark.soak
@pytest.mark.usefixtures("exact")
@settings(max_examples=count(10, 300), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=forests(),
    budget=st.sampled_from([4, 12, 40, 1000]),
    token_cost=st.sampled_from([math.inf, 3.0, 0.0]),
    block=st.sampled_from([1, 4, 128]),
    config=st.sampled_from(ANY),
)
def test_any_forest_gives_the_gradient_of_its_rows(
    rows: list[Row],
    budget: int,
    token_cost: float,
    block: int,
    config: JobConfig,
    double: tuple[str, LearnerCore, Path],
) -> None:
    if not any(any(row.mask) for row in rows):
        return
    model, core, adapter = double
    core._hold(adapter)
    rows = [row for row in rows if any(row.mask)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tiles, "BLOCK", block)
        patch.setattr(core.packer, "token_cost", token_cost)
        batch = second_update(
            core, rows, config.model_copy(update={"tokens_per_microbatch": budget})
        )
        total, _ = core.accumulate(batch, quiet)
    expected_total, expected = naive_gradient(model, adapter, rows, config)
    assert total == pytest.approx(expected_total, rel=1e-9, abs=1e-12)
    size = math.sqrt(sum(e.square().sum().item() for e in expected.values()))
    for name, parameter in core.parameters.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        error = (gradient - expected.get(name, 0)).norm().item()
        parameter.grad = None
        # Of forced tokens alone the gradient is zero, and the naive one is its rounding.
        assert error <= 1e-9 * size + 1e-12, (name, size)


@pytest.mark.parametrize(
    "name",
    ["gemma3", "gpt_oss", "qwen3_next", "granite", *map(in_soak_alone, ("llama", "mistral"))],
)
def test_logits_are_the_models_and_micro_batches_and_company_change_nothing(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    core = LearnerCore(str(models[name]))
    assert core.packer.padded_because is None
    rows = make_rows(5, seed=6, temperature=1.3) + branching_rows(5, seed=6)
    rows += restricted(branching_rows(5, seed=6))
    adapter = shake(fresh(core, tmp_path))
    core._hold(adapter)
    gradients, losses = [], []
    for tokens in (64, 10_000):
        config = PLAIN.model_copy(update={"tokens_per_microbatch": tokens})
        loss, _ = core.accumulate(core.batch(rows, config), quiet)
        losses.append(loss)
        gradients.append(gradients_of(core))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for key, gradient in gradients[0].items():
        error = (gradient - gradients[1][key]).norm() / gradient.norm()
        assert error < 2e-5, key
    together = core.logprobs(adapter, rows)
    for row, own in zip(rows, together, strict=True):
        (alone,) = core.logprobs(adapter, [row])
        assert own.tolist() == pytest.approx(alone.tolist(), abs=5e-6)
    plain = load_causal(str(models[name]), torch.float32, torch.device("cpu"))
    for row, own in zip(rows[:3], core.logprobs(None, rows[:3]), strict=True):
        with torch.no_grad():
            logits_TV = plain(torch.tensor([row.token_ids])).logits[0, :-1]
        if name == "gemma3":  # soft-capped, and reaching for it
            assert 1.0 < logits_TV.abs().max() <= 3.0
        expected_TV = (logits_TV / row.temperature).log_softmax(-1)
        expected_T = expected_TV[range(len(own) - 1), row.token_ids[1:]]
        assert own[1:].tolist() == pytest.approx(expected_T.tolist(), abs=2e-5)
