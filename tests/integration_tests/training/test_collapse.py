"""A fit whose policy collapses goes back, stops, or only says so; and rates that steps set.

The reward, not the policy, makes the collapse in all tests but that of the demo: versions that
`Falling` calls bad get -1.
"""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from examples.email_search.train import MAX_TOKENS, make_rollout
from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.tracing.run import Run
from langchain_art.tracing.scope import capture
from langchain_art.training import learning_rates
from langchain_art.training.records import FitResult
from langchain_art.training.recovery import MOST_ROLLBACKS, SLOWER
from langchain_art.wire import LoraConfig, LRSchedule, TrainConfig, default_learning_rate
from tests.support.chat_models import model_of
from tests.support.live_server import BASE_MODEL, ForkedServer, LiveServer
from tests.support.mails import mails_of
from tests.support.soak import in_soak, in_soak_alone
from tests.support.steps_of_a_fit import new_id
from tests.support.tiny_models import save_model
from tests.support.trainers import asking, said, trainer_of

SCENARIOS = [{"id": f"q-{i}", "question": f"Say {i}"} for i in range(16)]
RATE = 3e-4


@dataclass
class Falling:
    """A fit of one or two policies whose versions are bad from 1 to the last that was discarded."""

    server: LiveServer
    folder: Path
    policies: Sequence[str]
    always: bool = False
    """Every version above 0 is bad, and not only those before the first rollback."""
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.models = [model_of(self.server, one, max_tokens=2) for one in self.policies]
        settings = {
            "group_size": 2,
            "groups_per_step": 4,
            "config": TrainConfig(learning_rate=RATE),
        }
        settings |= self.options or {}
        self.trainer = trainer_of(self.server, self.folder, *self.policies, **settings)

    @property
    def said(self) -> str:
        return said(self.trainer)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "history.jsonl"
        text = path.read_text() if path.exists() else ""
        return [one for line in text.splitlines() if (one := json.loads(line))["kind"] == kind]

    async def rollout(self, scenario: dict[str, str]) -> Run:
        async with capture(scenario=scenario["id"]) as told:
            for model in self.models:
                await model.ainvoke(scenario["question"])
            version = int(str(told.turns[0].model).partition("@")[2])
            is_bad = 1 <= version <= self.last_bad()
            told.reward = -1.0 if is_bad else told.rng.random()
        return told

    def last_bad(self) -> float:
        done = self.lines("rollback")
        if self.always or not done:
            return float("inf")
        steps = [one for one in self.lines("step") if one["step"] <= done[0]["step"]]
        return max(one["results"][self.policies[0]]["version"] for one in steps)

    async def fit(self, steps: int, **options: Any) -> FitResult:
        return await self.trainer.fit(self.rollout, SCENARIOS, steps=steps, **options)

    def serving(self) -> list[int]:
        with ArtClient(self.server.base_url, self.server.api_key) as client:
            return [client.policy(policy).version for policy in self.policies]


def names(count: int = 1) -> list[str]:
    return [new_id("falling") for _ in range(count)]


async def test_the_default_goes_back_and_on_at_a_lower_rate(
    art_server: LiveServer, tmp_path: Path
) -> None:
    """A rate that steps have raised stays where the rollback puts it."""
    wide = TrainConfig(max_kl=10.0)  # all steps are short
    falling = Falling(art_server, tmp_path, names(), options={"config": wide})
    found = await falling.fit(4, eval_scenarios=SCENARIOS, eval_every=2)
    [done] = found.rollbacks
    assert (done.step, done.to_step, list(done.versions.values())) == (2, 0, [0])
    assert falling.lines("rollback") == [done.model_dump()]
    first, none, *later = [step.metrics.get("learning_rate") for step in found.history]
    assert none is None, "the collapsed batch has nothing to learn from"
    assert first is not None and later == pytest.approx([1.5 * first * SLOWER] * 2)
    assert [step.step for step in found.history] == [1, 2, 3, 4] and not found.stopped
    with ArtClient(art_server.base_url, art_server.api_key) as client:
        made = {one.version: one.parent for one in client.checkpoints(found.policy)}
    assert made[2] == 0 and found.version == 3
    assert found.after is not None and found.after.mean is not None and found.after.mean > 0
    assert "step 2: rewards fell from" in falling.said and "Rolled back to falling" in falling.said
    assert "steps 1, 2 are discarded" in falling.said and "1 of 3 at most" in falling.said


async def test_a_rollback_lowers_each_policys_rate(art_server: LiveServer, tmp_path: Path) -> None:
    first, second, frozen = names(3)
    config = {
        first: TrainConfig(learning_rate=RATE),
        second: TrainConfig(learning_rate=RATE / 3),
        frozen: None,
    }
    falling = Falling(art_server, tmp_path, (first, second, frozen), options={"config": config})
    found = await falling.fit(3)
    (done,) = found.rollbacks
    assert done.learning_rate == pytest.approx({first: RATE / 3, second: RATE / 9})
    assert done.versions.keys() == {first, second}
    last = found.history[-1].metrics
    assert last[f"{first}/learning_rate"] == pytest.approx(RATE / 3)
    assert last[f"{second}/learning_rate"] == pytest.approx(RATE / 9)
    assert f"{RATE / 3:.3g} ({first}) and {RATE / 9:.3g} ({second}) from here on" in falling.said


@pytest.mark.parametrize("mode", ["warn", "stop"])
async def test_it_may_stop_or_only_be_said(
    art_server: LiveServer, tmp_path: Path, mode: str
) -> None:
    falling = Falling(art_server, tmp_path, names(), options={"on_collapse": mode})
    found = await falling.fit(3)
    assert falling.said.count("step 2: rewards fell from") >= 1
    assert "The update of step 1 likely went too far. Roll back to the version" in falling.said
    assert not found.rollbacks and falling.serving() == [1]
    assert len(found.history) == (2 if mode == "stop" else 3)
    assert ("step 2: rewards fell" in found.stopped) is (mode == "stop")
    if mode == "stop":
        again = await falling.fit(3)
        assert again == found and "Ended already: 2 steps" in falling.said


async def test_a_fit_that_collapses_again_and_again_ends_on_a_good_version(
    art_server: LiveServer, tmp_path: Path
) -> None:
    options = {"groups_per_step": 8}  # a fall of less is not certain each time
    falling = Falling(art_server, tmp_path, names(), always=True, options=options)
    found = await falling.fit(20)
    assert len(found.rollbacks) == MOST_ROLLBACKS + 1
    assert len(found.history) == 2 * (MOST_ROLLBACKS + 1) and falling.serving() == [0]
    rates = [rate for one in found.rollbacks for rate in one.learning_rate.values()]
    assert rates == pytest.approx([RATE * SLOWER**n for n in (1, 2, 3, 4)])
    assert "rolled back 4 times" in found.stopped and "max_kl" in found.stopped
    assert found.versions == {found.policy: 0}


async def test_runs_that_are_ahead_of_a_rollback_are_not_trained(
    art_server: LiveServer, tmp_path: Path
) -> None:
    falling = Falling(art_server, tmp_path, names(), options={"max_steps_ahead": 2})
    found = await falling.fit(5)
    assert len(found.rollbacks) == 1 and not found.stopped
    back = found.rollbacks[0]
    assert back.to_step == 0 and "groups.rolled_back" not in found.excluded
    after = [step for step in found.history if step.step > back.step]
    assert after and all((step.reward_mean or -1) > 0 for step in after)


@pytest.mark.parametrize("killed_at", [in_soak_alone(0), 1, in_soak_alone(2)])
def test_a_client_that_is_killed_within_a_rollback(
    art_server: LiveServer, tmp_path: Path, killed_at: int
) -> None:
    """Killed before the rollback of the first policy, of the second, and after both."""
    both = names(2)
    if (child := os.fork()) == 0:
        calls, rollback = 0, AsyncArtClient.rollback

        async def last_words(client: AsyncArtClient, *to: Any) -> Any:
            nonlocal calls
            done = await rollback(client, *to) if calls < killed_at else None
            calls += 1
            if calls > min(killed_at, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        AsyncArtClient.rollback = last_words  # type: ignore[method-assign]
        try:
            asyncio.run(Falling(art_server, tmp_path, both).fit(3))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    falling = Falling(art_server, tmp_path, both)
    assert falling.serving() == [[1, 1], [0, 1], [0, 0]][killed_at]
    assert len(falling.lines("rollback")) == 1 and len(falling.lines("step")) == 2
    found = asyncio.run(falling.fit(3))
    assert len(found.rollbacks) == 1 and len(found.history) == 3
    assert falling.said.count("is rolled back to @0") == 2 - killed_at
    with ArtClient(art_server.base_url, art_server.api_key) as client:
        for policy in both:
            made = {one.version: one.parent for one in client.checkpoints(policy)}
            assert made[2] == 0 and found.versions[policy] == 2
    with art_server.http() as http:
        log = http.get("/v1/log", params={"limit": 1000}).json()["data"]
    undone = [one for one in log if one["subject"].startswith(tuple(f"{one}@0: " for one in both))]
    assert [one["action"] for one in undone] == ["rolled_back"] * 2


async def test_a_fit_killed_before_it_looked_at_its_last_step_looks_when_it_resumes(
    art_server: LiveServer, tmp_path: Path
) -> None:
    policy = names()

    def killed(record: Any) -> None:
        if record.step == 2:
            raise RuntimeError("the end")

    with pytest.raises(RuntimeError, match="the end"):
        await Falling(art_server, tmp_path, policy).fit(2, on_step=killed)
    found = await Falling(art_server, tmp_path, policy).fit(2)
    assert [one.step for one in found.rollbacks] == [2]


HELD_OUT = [{"id": f"held-out-{i}", "question": f"Say {i}"} for i in range(16)]


def drifting(falling: Falling) -> Callable[[dict[str, str]], Awaitable[Run]]:
    """Training rewards vary by chance; held out, the base solves all, and what comes after half."""

    async def rollout(scenario: dict[str, str]) -> Run:
        run = await falling.rollout(scenario)
        run.reward = sum(run.id.encode()) % 97 / 97
        if scenario["id"].startswith("held-out"):
            version = int(str(run.turns[0].model).partition("@")[2])
            run.reward = float(not version or int(scenario["id"].split("-")[-1]) % 2 == 0)
        return run

    return rollout


async def test_a_fit_that_ends_clearly_below_its_best_version_goes_back_to_it(
    art_server: LiveServer, tmp_path: Path
) -> None:
    falling = Falling(art_server, tmp_path, names())
    how: dict[str, Any] = {"steps": 2, "eval_scenarios": HELD_OUT}
    found = await falling.trainer.fit(drifting(falling), SCENARIOS, **how)
    assert "step 2: held-out reward fell from 1.000" in falling.said
    assert "8 scenarios fell and 0 rose" in falling.said
    assert len(found.rollbacks) == 1 and found.after is not None
    assert falling.serving() == [0] and found.versions == {found.policy: 0}
    assert (found.after.step, found.after.mean) == (2, 1.0)
    assert "rolled back" in falling.said.partition("held out after")[2], "in the summary too"


def test_a_client_that_is_killed_while_it_goes_back_rolls_back_once(
    art_server: LiveServer, tmp_path: Path
) -> None:
    policy = names()

    def fit() -> tuple[Falling, FitResult]:
        falling = Falling(art_server, tmp_path, policy)
        how: dict[str, Any] = {"steps": 1, "eval_scenarios": HELD_OUT}
        return falling, falling.trainer.fit_sync(drifting(falling), SCENARIOS, **how)

    if (child := os.fork()) == 0:
        rollback = AsyncArtClient.rollback

        async def last_words(client: AsyncArtClient, *to: Any) -> Any:
            await rollback(client, *to)
            os.kill(os.getpid(), signal.SIGKILL)

        AsyncArtClient.rollback = last_words  # type: ignore[method-assign]
        try:
            fit()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    falling, found = fit()
    assert len(found.rollbacks) == len(falling.lines("rollback")) == 1
    assert falling.serving() == [0] and found.versions == {policy[0]: 0}
    with art_server.http() as http:
        log = http.get("/v1/log", params={"limit": 1000}).json()["data"]
    undone = [one for one in log if one["subject"].startswith(f"{policy[0]}@0: step 1: held-out")]
    assert [one["action"] for one in undone] == ["rolled_back"]


async def test_held_out_rewards_without_a_further_gain_end_a_fit(
    art_server: LiveServer, tmp_path: Path
) -> None:
    falling = Falling(art_server, tmp_path, names(), options={"on_collapse": "warn"})

    async def rollout(scenario: dict[str, str]) -> Run:
        run = await falling.rollout(scenario)
        if scenario["id"].startswith("held-out"):
            run.reward = float(scenario["id"][-1]) / 4
        return run

    how: dict[str, Any] = {"steps": 5, "eval_scenarios": HELD_OUT[:4], "eval_every": 1}
    found = await falling.trainer.fit(rollout, SCENARIOS, **how, stop_early=2)
    assert len(found.history) == 2 and found.after is not None and found.after.step == 2
    assert "no further gain in 2 evaluations" in found.stopped and "ended early" in falling.said
    for wrong in ({"stop_early": 0}, {"stop_early": 1, "eval_scenarios": HELD_OUT[:1]}):
        with pytest.raises(ConfigError, match="at least two scenarios"):
            await falling.trainer.fit(rollout, SCENARIOS, **(how | wrong))
    with pytest.raises(ConfigError, match="got stop_early=2 without eval_every"):
        await falling.trainer.fit(
            rollout, SCENARIOS, steps=5, eval_scenarios=HELD_OUT, stop_early=2
        )
    with pytest.raises(ConfigError, match=r"got on_collapse='roll', expected one of \('rollback'"):
        Falling(art_server, tmp_path, names(), options={"on_collapse": "roll"})


@in_soak  # what a fit does then is shown by all tests above
@pytest.mark.slow
def test_a_real_collapse_of_the_demo_is_undone(tmp_path: Path) -> None:
    """At thirty times the demo's learning rate, rewards are 0 after two to five steps."""
    mails, policy = mails_of(tmp_path, 160, 1), new_id("p")
    config = TrainConfig(
        learning_rate=1e-1, schedule=LRSchedule(warmup_steps=5), momentum=0.9, max_kl=None
    )
    options: dict[str, Any] = {"groups_per_step": 16, "lora": None, "config": config}
    with ForkedServer(tmp_path / "data", model=BASE_MODEL) as server:
        rollout = make_rollout(model_of(server, policy, max_tokens=MAX_TOKENS), mails)
        trainer = trainer_of(server, tmp_path / "fit", policy, **options)
        found = trainer.fit_sync(rollout, mails.scenarios("train"), steps=9)
    shown = [(one.step, one.reward_mean) for one in found.history], found.rollbacks
    assert found.rollbacks, shown
    after = [one.reward_mean or 0 for one in found.history if one.step > found.rollbacks[0].step]
    assert after and after[0] > 0.1, shown
    # A fall in the last steps may not be certain yet.
    assert found.versions == found.rollbacks[-1].versions or max(after[-3:]) > 0.1, shown


# --- rates that the config does not name ----------------------------------------------------------

#: What the policy is to say, and after what.
WANTED = frozenset("aeiou")
ITEMS = [{"id": f"item {n}", "question": f"item {n}"} for n in range(8)]


@pytest.fixture(scope="module")
def random_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedServer]:
    """A server of a model that says anything."""
    folder = tmp_path_factory.mktemp("random")
    with ForkedServer(folder / "data", model=save_model(folder / "model")) as server:
        yield server


class Bandit:
    """A fit of a new policy of a random model, which is rewarded for the share of its vowels."""

    def __init__(self, server: ForkedServer, out: Path, config: TrainConfig | None = None) -> None:
        self.server, self.policy = server, new_id("bandit")
        options = {"group_size": 8, "groups_per_step": 2, "lora": None}
        self.trainer = trainer_of(server, out, self.policy, config=config, **options)

    @staticmethod
    def worth(_: Run, said: str) -> float:
        return sum(one in WANTED for one in said) / max(8, len(said))

    def fit(self, steps: int) -> FitResult:
        rollout = asking(self.worth, model_of(self.server, self.policy))
        return self.trainer.fit_sync(rollout, ITEMS, steps=steps)

    def adapter(self, version: int) -> str:
        folder = self.server.data_dir / "adapters" / self.policy / f"{version}"
        return sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


def rates_of(found: FitResult) -> list[float]:
    return [one.metrics["learning_rate"] for one in found.history]


def test_a_fit_that_is_paused_goes_on_with_the_rate_it_had_come_to(
    random_server: ForkedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def wrong(parameters: int, lora: LoraConfig, kind: str = "rl") -> float:
        """A thirtieth of what is chosen by the model's size."""
        return default_learning_rate(parameters, lora, kind) / 30

    monkeypatch.setattr(learning_rates, "default_learning_rate", wrong)
    whole, parts = (Bandit(random_server, tmp_path / name) for name in ("whole", "parts"))
    found = whole.fit(3)
    rates = rates_of(found)
    assert rates == pytest.approx([rates[0] * 1.5**n for n in range(3)])
    parts.fit(2)
    assert rates_of(parts.fit(3)) == rates
    assert parts.adapter(3) == whole.adapter(3)
    assert f"rate {rates[2]:.3g}" in said(whole.trainer)


def test_a_rate_that_is_named_stays(random_server: ForkedServer, tmp_path: Path) -> None:
    fit = Bandit(random_server, tmp_path, TrainConfig(learning_rate=2e-5))
    assert rates_of(fit.fit(5)) == [2e-5] * 5
    shown = said(fit.trainer)
    assert shown.count("hardly learns: most of the last 5 steps moved it by") == 1
    assert "Its learning_rate, 2e-05, is too low: name 0.0" in shown
