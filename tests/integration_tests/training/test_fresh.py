"""`fit(fresh=True)` undoes what a policy has learned: only once a run of the new fit has worked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from langchain_art import ArtClient, ConfigError, RolloutFailed, TrainConfig, capture
from langchain_art.tracing.run import Run
from langchain_art.training.fit_state import FIT, FitState, read_state
from tests.support.chat_models import model_of
from tests.support.steps_of_a_fit import new_id
from tests.support.stub_engines import StubServer
from tests.support.trainers import said, trainer_of

SCENARIOS = [{"q": "a"}, {"q": "b"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    with StubServer(tmp_path_factory.mktemp("fresh") / "data") as started:
        yield started


class Fit:
    """Fits of one policy in one folder, whose rollout raises as often as it is told."""

    def __init__(self, server: StubServer, out: Path) -> None:
        self.out, self.policy, self.server = out, new_id("fresh"), server
        self.model = model_of(server, self.policy, max_tokens=4)
        self.raises = 0
        self.runs = 0

    async def rollout(self, scenario: dict[str, str]) -> Run:
        self.runs += 1
        async with capture(scenario=scenario) as run:
            reply = await self.model.ainvoke(f"{scenario['q']} {run.id}")
            if self.raises:
                self.raises -= 1
                raise ValueError("no such tool")
            run.reward = (sum(reply.text.encode()) % 97) / 97
        return run

    def fit(self, rollout: Any = None, **options: Any) -> int:
        more = {"config": TrainConfig(learning_rate=1e-4)} | options.pop("trainer", {})
        trainer = trainer_of(self.server, self.out, self.policy, **more)
        known: dict[str, Any] = {"steps": 1, "fresh": True} | options
        return trainer.fit_sync(rollout or self.rollout, SCENARIOS, **known).version

    @property
    def state(self) -> tuple[int, set[str], int]:
        """The version that serves, the fit's files, and the policy's jobs."""
        with ArtClient(self.server.base_url) as client:
            version, jobs = client.policy(self.policy).version, client.jobs(self.policy)
        return version, {str(p.relative_to(self.out)) for p in self.out.rglob("*.json*")}, len(jobs)


@pytest.fixture
def trained(server: StubServer, tmp_path: Path) -> Fit:
    found = Fit(server, tmp_path)
    assert found.fit(steps=2) == 2
    assert found.runs == 16, "nothing is tried where nothing is undone"
    found.runs = 0
    return found


def test_no_run_that_works_undoes_nothing(trained: Fit) -> None:
    before = trained.state
    trained.raises = 10**9
    with pytest.raises(RolloutFailed, match=r"(?s)no such tool.*Nothing was rolled back"):
        trained.fit()
    assert trained.state == before
    assert trained.runs == 3, "as many as may fail of a group, and one more"
    with pytest.raises(RolloutFailed, match="Nothing was rolled back"):
        trained.fit(trainer={"max_failed": 1.0})
    assert (trained.state, trained.runs) == (before, 3 + 4)
    trained.raises = 0
    assert trained.fit(steps=3, fresh=False) == 3, "the earlier fit goes on"


def test_one_run_that_works_is_enough_and_what_was_pinned_stays_until_there_is_a_version(
    trained: Fit,
) -> None:
    def pinned() -> list[str]:
        with ArtClient(trained.server.base_url) as client:
            return [one.name for one in client.checkpoints(trained.policy) if one.pinned]

    former, seen = [f"{trained.policy}@2"], list[list[str]]()
    assert pinned() == former
    trained.raises = 1

    async def rollout(scenario: dict[str, str]) -> Run:
        seen.append(pinned())
        return await trained.rollout(scenario)

    assert trained.fit(rollout) == 3, "from @0; a version's number is used once"
    assert seen[2:] == [former] * 8, "two runs are tried"
    assert pinned() == [f"{trained.policy}@3"]
    with ArtClient(trained.server.base_url) as client:
        parents = {one.version: one.parent for one in client.checkpoints(trained.policy)}
    assert parents[3] == 0


def test_a_fit_that_cannot_begin_undoes_nothing(trained: Fit) -> None:
    class Graph:
        async def ainvoke(self, state: Any, config: Any) -> Any: ...

    before = trained.state
    with pytest.raises(ConfigError, match="expected a JSON value"):
        trained.fit(eval_scenarios=[{"q": object()}], trainer={"workers": "server"})
    evaluated: dict[str, Any] = {"evaluator": lambda group: [0.5] * len(group.trajectories)}
    with pytest.raises(ConfigError, match="no input for a graph"):
        trained.fit(Graph(), eval_scenarios=[17], trainer=evaluated)
    assert trained.state == before


def test_a_warm_start_of_one_policy_says_nothing_of_another(
    server: StubServer, tmp_path: Path
) -> None:
    policies = writer, critic = "fresh-writer", "fresh-critic"
    warm = trainer_of(server, tmp_path, writer)
    talk = [[{"role": "user", "content": q}, {"role": "assistant", "content": "b"}] for q in "xyz"]
    assert warm.warm_start_sync(talk, batch_size=1).version == 3
    models = [model_of(server, policy, max_tokens=4) for policy in policies]

    async def rollout(scenario: dict[str, str]) -> Run:
        async with capture(scenario=scenario) as run:
            for model in models:
                reply = await model.ainvoke(f"{scenario['q']} {run.id}")
            run.reward = (sum(reply.text.encode()) % 97) / 97
        return run

    small = {"group_size": 2, "groups_per_step": 1}
    trainer = trainer_of(server, tmp_path, *policies, **small)
    assert trainer.fit_sync(rollout, SCENARIOS, steps=4).versions == {writer: 7, critic: 4}
    trainer = trainer_of(server, tmp_path, *policies, **small)
    trainer.fit_sync(rollout, SCENARIOS, steps=1, fresh=True)
    state = read_state(tmp_path / FIT, FitState)
    assert state is not None
    assert state.began_with == {writer: 3, critic: 0}
    assert f"{critic} is rolled back from @4 to @0" in said(trainer)
    assert "use fit(…, fresh=True)" not in said(trainer), "that is what was called"
    assert f"{writer} is at @3: this fit goes on" in said(trainer)
