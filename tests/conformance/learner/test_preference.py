"""Preference steps of the learner core: against the paper's loss in float64, packed in any way."""

import itertools
import math
from pathlib import Path

import pytest

from langchain_art.wire import PreferenceConfig
from langchain_art_server.backends.peft import packer
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.jobs.batch_builder import Batch
from langchain_art_server.jobs.sft_records import PairLogprobs, preference_weights, weigh_pairs
from tests.support.learner_cases import FILES, contents, folder, fresh, quiet, shake, worst_error
from tests.support.preference_cases import OfCore, Pair, batch_of, make_pairs, naive_dpo, prefer
from tests.support.soak import in_soak_alone

#: By what the pairs are.
BETAS = {"replies": 0.01, "turns": 0.2, "alike": 3.0}
LAYOUTS = ("forest", "small", "padded")
#: Each layout, and pairs of each kind.
SHOWN = [("forest", "turns"), ("small", "alike"), ("padded", "replies")]


async def weighed(
    core: LearnerCore, adapter: Path, pairs: list[Pair], tokens: int, beta: float
) -> Batch:
    batch = batch_of(pairs, PreferenceConfig(beta=beta, tokens_per_microbatch=tokens))
    await weigh_pairs(batch, OfCore(core), adapter, beta)  # type: ignore[arg-type]
    return batch


def same_replies(pairs: list[Pair]) -> list[Pair]:
    """Sides that begin alike: a common first reply, a common beginning of the second one."""
    changed: list[Pair] = []
    for pair in pairs:
        (prompt, said), *_ = pair.chosen
        later = [*prompt, *said, 5, 6]
        sides = [[(prompt, said), (later, [7, 8, last, 0])] for last in (9, 10)]
        changed.append(Pair(*sides))
    return changed


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *SHOWN,
        *(in_soak_alone(*one) for one in itertools.product(LAYOUTS, BETAS) if one not in SHOWN),
    ],
)
async def test_loss_and_gradient_equal_the_papers_in_float64(
    layout: str, kind: str, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "padded":  # as for models whose attention has no forest
        monkeypatch.setattr(packer, "use_forest", lambda _: "the test says so")
    core = LearnerCore(tiny, dtype="float64")
    adapter = shake(fresh(core, tmp_path))
    pairs = make_pairs(7, seed=2, turns=1 if kind == "replies" else 3)
    pairs = same_replies(pairs) if kind == "alike" else pairs
    tokens, beta = 64 if layout == "small" else 10_000, BETAS[kind]
    batch = await weighed(core, adapter, pairs, tokens, beta)
    core._hold(adapter)
    made = core.batch(batch.rows, batch.config)
    _, stats = core.accumulate(made, quiet)
    loss, expected = naive_dpo(tiny, adapter, pairs, beta)
    assert batch.metrics["loss"] == pytest.approx(loss, rel=1e-9)
    assert worst_error(core, expected) < 1e-9
    assert stats.tokens == sum(
        len(said) for pair in pairs for side in (pair.chosen, pair.rejected) for _, said in side
    )
    shown = sum(len(row.token_ids) - 1 for row in batch.rows)
    if layout == "forest":
        assert made.packing.tokens < 0.85 * shown  # the common prompt once
    else:
        assert (made.packing.tokens < shown) == (layout == "small")


async def test_a_certain_pair_leaves_the_policy_as_it_is(tiny: str, tmp_path: Path) -> None:
    """Its weights are zero: neither rounding nor the momentum of earlier steps moves anything."""
    core, pairs = LearnerCore(tiny), make_pairs(3, seed=4)
    one, two = folder(tmp_path, "one"), folder(tmp_path, "two")
    start = fresh(core, tmp_path)
    first = await prefer(OfCore(core), start, one, 1, pairs, PreferenceConfig(learning_rate=0.05))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    sure = PreferenceConfig(learning_rate=0.05, beta=1e5)
    metrics = await prefer(OfCore(core), one, two, 2, pairs, sure)
    assert (metrics["loss"], metrics["grad_norm"], metrics["pairs_trained"]) == (0.0, 0.0, 3.0)
    assert metrics["preference_accuracy"] == 1.0
    assert contents(two) == contents(one)
    assert contents(one)[FILES[1]] != contents(start)[FILES[1]]


def test_margins_that_would_overflow_have_their_loss_and_weights() -> None:
    certain, wrong = PairLogprobs(0.0, -1e5, -9.0, -9.0), PairLogprobs(-1e5, 0.0, -9.0, -9.0)
    for pair, loss, weight, order in ((certain, 0.0, 0.0, 1.0), (wrong, 1e5, 1.0, 0.0)):
        weights, metrics = preference_weights([pair], 1.0)
        assert (metrics["preference_loss"], weights) == (loss, [weight])
        assert metrics["preference_order"] == order
