"""Dynamic sampling replaces zero-variance groups."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from langchain_art import AsyncArtClient, ChatART, Trainer, capture
from langchain_art.training.records import FitResult
from langchain_art.training.report import summary_table
from tests.support import trainers
from tests.support.chat_models import model_of
from tests.support.live_server import LiveServer
from tests.support.soak import in_soak_alone
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import Heard, said

#: Every third scenario has something to teach; the others' runs are all worth the same.
SCENARIOS = [{"id": f"q-{i}", "useful": i % 3 == 0} for i in range(60)]


class Rollouts:
    """Rewards by the number of the run of its scenario, whatever the model says."""

    def __init__(self, model: ChatART) -> None:
        self.model: Any = model
        self.seen: list[str] = []

    def __call__(self, scenario: dict[str, Any]) -> Any:
        number = self.seen.count(scenario["id"])
        self.seen.append(scenario["id"])
        with capture() as run:
            self.model.invoke(f"Say {scenario['id']}.")
            run.reward = float(number % 2) if scenario["useful"] else 1.0
        return run


def trainer_of(
    server: LiveServer, out: Path, rounds: int | None = 30, **options: Any
) -> tuple[Trainer, Rollouts]:
    policy = new_id("p")
    chosen = {"group_size": 2, "groups_per_step": 4, "seed": 3, "concurrency": 1} | options
    trainer = trainers.trainer_of(server, out, policy, dynamic_sampling_rounds=rounds, **chosen)
    return trainer, Rollouts(model_of(server, policy, max_tokens=4))


@pytest.fixture(scope="module")
def whole(
    art_server: LiveServer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FitResult, list[str]]:
    """A fit that nothing stops, and the scenarios of its runs."""
    trainer, rollouts = trainer_of(art_server, tmp_path_factory.mktemp("calm"))
    return trainer.fit_sync(rollouts, SCENARIOS, steps=2), rollouts.seen


def test_zero_variance_groups_are_replaced_and_counted(whole: tuple[FitResult, list[str]]) -> None:
    result, seen = whole
    useful = {s["id"] for s in SCENARIOS if s["useful"]}
    for record in result.history:
        assert record.groups == 4 + record.resampled
        flat = record.excluded["groups.zero_variance"]
        assert record.groups - flat == 4
        assert record.metrics["runs_trained"] == 8
        assert record.resampled > 0
    times = Counter(seen)
    assert set(times.values()) == {2}  # one epoch, without replacement, over both steps
    assert sum(r.groups for r in result.history) == len(times)
    assert len(useful & set(times)) == 8
    shown = Heard()
    shown.print(summary_table(result))
    resampled = sum(r.resampled for r in result.history)
    assert f"{resampled} of {8 + resampled} groups" in shown.said


@pytest.mark.parametrize("rounds", [in_soak_alone(0), 2])
def test_dynamic_sampling_ends_at_its_bound(
    art_server: LiveServer, tmp_path: Path, rounds: int
) -> None:
    flat = [s for s in SCENARIOS if not s["useful"]]
    trainer, rollouts = trainer_of(art_server, tmp_path, rounds)
    result = trainer.fit_sync(rollouts, flat, steps=1)
    (record,) = result.history
    groups = 4 * (1 + rounds)
    assert (record.groups, record.resampled, len(rollouts.seen)) == (groups, groups - 4, 2 * groups)
    assert record.excluded == {"groups.zero_variance": groups}
    assert result.version == 0


@pytest.mark.parametrize(
    ("mix", "groups"),
    [
        ("UUSS", 4),  # half of them teach
        ("DDDUDDDD", 4),  # what is done is not replaced
        ("SSSS", 4),  # no run was better
        in_soak_alone("SSSUSSUS", 5),
        ("SSSUSSSS", 7),  # three times
        in_soak_alone("SSSDSSSU", 7),
    ],
)
def test_unasked_a_step_replaces_what_fell_short_until_half_of_it_teaches(
    art_server: LiveServer, tmp_path: Path, mix: str, groups: int
) -> None:
    """Scenarios whose two runs differ (U), both fail (S: fell short), or both succeed (D: done).

    Of eight, the seed draws those of the indices 3, 4, 7, 5, 6, 0, 2.
    """
    scenarios = [{"id": f"{i}{kind}", "useful": kind == "U"} for i, kind in enumerate(mix)]
    trainer, rollouts = trainer_of(art_server, tmp_path, None)

    def rollout(scenario: dict[str, Any]) -> Any:
        run = rollouts(scenario)
        run.reward = 0.0 if scenario["id"].endswith("S") else run.reward
        return run

    (record,) = trainer.fit_sync(rollout, scenarios, steps=1).history
    assert (record.groups, record.resampled) == (groups, groups - 4)
    assert len(rollouts.seen) == 2 * groups


@pytest.mark.parametrize(
    "way", [{"top_k": 1}, in_soak_alone({"top_p": 1e-6}), {"temperature": 0.0}]
)
def test_replies_in_which_nothing_was_drawn_make_no_version(
    art_server: LiveServer, tmp_path: Path, way: dict[str, Any]
) -> None:
    """Their gradient is 0, whatever the rewards are."""
    trainer, rollouts = trainer_of(art_server, tmp_path, 0)
    rollouts.model = rollouts.model.bind(extra_body=way)
    result = trainer.fit_sync(rollouts, [s for s in SCENARIOS if s["useful"]], steps=1)
    (record,) = result.history
    reason = "greedy_decoding" if "temperature" in way else "no_choice"
    assert record.excluded == {f"calls.{reason}": 8, "runs.without_trainable_calls": 8}
    assert result.version == 0


async def test_a_fit_that_was_stopped_while_it_trained_goes_on_exactly(
    whole: tuple[FitResult, list[str]],
    art_server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, seen = whole
    stormy, others = trainer_of(art_server, tmp_path)
    train, orders = AsyncArtClient.train, 0

    async def dying(self: AsyncArtClient, *args: Any, **more: Any) -> Any:
        nonlocal orders
        orders += 1
        if orders == 2:
            raise KeyboardInterrupt
        return await train(self, *args, **more)

    monkeypatch.setattr(AsyncArtClient, "train", dying)
    with pytest.raises(KeyboardInterrupt):
        await stormy.fit(others, SCENARIOS, steps=2)
    resumed = await stormy.fit(others, SCENARIOS, steps=2)
    assert others.seen == seen  # nothing twice, nothing else, in the same order
    for one, other in zip(result.history, resumed.history, strict=True):
        for field in ("groups", "resampled", "drawn", "excluded"):
            assert getattr(one, field) == getattr(other, field), field


def test_groups_of_which_no_call_was_heard_are_not_replaced(
    art_server: LiveServer, tmp_path: Path
) -> None:
    trainer, rollouts = trainer_of(art_server, tmp_path, None)

    def rollout(scenario: dict[str, Any]) -> Any:
        rollouts(scenario)  # in a scope of its own, which is thrown away
        with capture() as run:
            run.reward = float(scenario["useful"])
        return run

    (record,) = trainer.fit_sync(rollout, SCENARIOS, steps=1).history
    assert (record.groups, record.resampled) == (4, 0)
    assert "8 of the 8 runs of the first batch: no model call was recorded" in said(trainer)
