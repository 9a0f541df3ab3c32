"""A fit whose advantages are the user's: sent with the step, recorded, shown, and sent once."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from langchain_art import ArtClient, Trainer
from langchain_art.errors import ConfigError, RequestRefused
from langchain_art.wire import TrajectoryGroup
from tests.support.chat_models import model_of
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import asking, said, trainer_of

SCENARIOS = [{"id": f"q-{i}", "question": f"Say {i}"} for i in range(8)]


class Fit:
    """A trainer with a hook. All rewards are equal: built-in estimators would learn nothing."""

    def __init__(
        self, server: LiveServer, folder: Path, hook: Any, reward: float | None = 1.0, **more: Any
    ) -> None:
        self.server, self.folder, self.policy = server, folder, new_id("own")
        self.trainer = self.trainer_with(hook, **more)
        self.rollout = asking(lambda *_: reward, model_of(server, self.policy, max_tokens=4))

    def trainer_with(self, hook: Any, **more: Any) -> Trainer:
        options = {"group_size": 2, "advantages": hook} | more
        return trainer_of(self.server, self.folder, self.policy, **options)

    async def fit(self, steps: int) -> Any:
        return await self.trainer.fit(self.rollout, SCENARIOS, steps=steps)


def first_is_better(group: TrajectoryGroup) -> list[Any]:
    """The first run's tokens, one by one; the second run by one number."""
    turn = group.trajectories[0].turns[0]
    assert turn.usage is not None
    return [[[1.0] + [0.5] * (turn.usage.completion_tokens - 1)], -1.0]


async def test_a_fit_learns_from_the_numbers_of_a_function(
    art_server: LiveServer, tmp_path: Path
) -> None:
    own = Fit(art_server, tmp_path, first_is_better, dynamic_sampling_rounds=3)
    found = await own.fit(2)
    assert found.version == 2 and not found.excluded
    assert [(one.own_advantages, one.resampled) for one in found.history] == [(True, 0)] * 2
    assert "of 2 steps given by Trainer(advantages=…)" in said(own.trainer)
    with ArtClient(art_server.base_url) as client, art_server.http() as http:
        job = client.jobs(found.policy)[0]
        first, second = runs_of(client, http, job.id, found.policy)
        assert first["reward"] == 1.0
        [turn] = first["turns"]
        tokens = turn["token_advantages"]
        assert tokens[0] == 1.0 and set(tokens[1:]) <= {0.5}
        assert turn["advantage"] == pytest.approx(sum(tokens) / len(tokens))
        assert second["turns"][0]["token_advantages"] is None
        assert second["turns"][0]["advantage"] == -1.0


def runs_of(client: ArtClient, http: httpx.Client, job: str, policy: str) -> list[dict[str, Any]]:
    """What the job gave to both runs of one of its groups, the better one first."""
    listed = http.get("/page/runs", params={"policy": policy, "step": 1}).json()["runs"]
    scenario = client.trajectory(listed[0]["id"]).scenario
    mine = [one["id"] for one in listed if client.trajectory(one["id"]).scenario == scenario]
    given = [http.get(f"/page/runs/{one}/credit/{job}").json() for one in mine]
    return sorted(given, key=lambda one: -one["turns"][0]["advantage"])


async def test_a_fit_that_was_interrupted_sends_the_same_numbers(
    art_server: LiveServer, tmp_path: Path
) -> None:
    """They are stored with the step; a function that changed is another fit."""
    asked = list[str]()

    def hook(group: TrajectoryGroup) -> list[float]:
        asked.append(group.id)
        return [0.5, -0.5]

    own = Fit(art_server, tmp_path, hook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("langchain_art.client.async_client.AsyncArtClient.train", broken)
        with pytest.raises(RuntimeError, match="the client's end"):
            await own.fit(1)
    assert len(asked) == 2
    found = await own.fit(1)
    assert len(asked) == 2 and found.history[0].own_advantages and found.version == 1
    other = own.trainer_with(first_is_better)
    with pytest.raises(ConfigError, match="the advantage function's source"):
        await other.fit(own.rollout, SCENARIOS, steps=2)


async def test_runs_without_a_reward_learn_from_the_numbers_of_a_function(
    art_server: LiveServer, tmp_path: Path
) -> None:
    found = await Fit(art_server, tmp_path, first_is_better, reward=None).fit(1)
    assert found.version == 1 and not found.excluded
    assert found.history[0].reward_mean is None


def broken(*given: Any, **options: Any) -> Any:
    raise RuntimeError("the client's end")


async def test_the_server_refuses_numbers_for_other_turns(
    art_server: LiveServer, tmp_path: Path
) -> None:
    own = Fit(art_server, tmp_path, None)
    await own.fit(1)
    policy = own.trainer.policy
    with ArtClient(art_server.base_url) as client, art_server.http() as http:
        run = http.get("/page/runs", params={"policy": policy}).json()["runs"][0]["id"]
        for given, words in (
            ((1.0, 2.0), "got 2 advantages for the 1 turns"),
            ((), "got 0 advantages for the 1 turns"),
        ):
            with pytest.raises(RequestRefused, match=words):
                client.train([[run]], policy, advantages={run: given})
