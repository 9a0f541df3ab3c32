"""Advantages of the user's, and a loss that the server's operator has registered."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from langchain_art import ArtClient, OwnLoss, TrainConfig, Trainer
from langchain_art.errors import ConfigError, InvalidRequest, JobFailed, RequestRefused
from langchain_art.wire import TrajectoryGroup
from tests.integration_tests.training.test_trainable import runs_of as rewarded
from tests.support.chat_models import model_of
from tests.support.live_server import ForkedServer, LiveServer
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import asking, said, trainer_of

SCENARIOS = [{"id": f"q-{i}", "question": f"Say {i}"} for i in range(8)]


class Fit:
    """A trainer with a hook. All rewards are equal: built-in estimators would learn nothing."""

    def __init__(self, server: LiveServer, folder: Path, hook: Any, reward: float | None) -> None:
        self.server, self.folder, self.policy = server, folder, new_id("own")
        self.trainer = self.trainer_with(hook)
        self.rollout = asking(lambda *_: reward, model_of(server, self.policy, max_tokens=4))

    def trainer_with(self, hook: Any) -> Trainer:
        options = {"group_size": 2, "advantages": hook, "dynamic_sampling_rounds": 3}
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
    own = Fit(art_server, tmp_path, first_is_better, 1.0)
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
    """They are stored with the step, whose runs have no reward; another function is another fit."""
    asked = list[str]()

    def hook(group: TrajectoryGroup) -> list[float]:
        asked.append(group.id)
        return [0.5, -0.5]

    own = Fit(art_server, tmp_path, hook, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("langchain_art.client.async_client.AsyncArtClient.train", broken)
        with pytest.raises(RuntimeError, match="the client's end"):
            await own.fit(1)
    assert len(asked) == 2
    found = await own.fit(1)
    assert len(asked) == 2 and found.history[0].own_advantages and found.version == 1
    assert found.history[0].reward_mean is None and not found.excluded
    with ArtClient(art_server.base_url) as client, art_server.http() as http:
        run = http.get("/page/runs", params={"policy": own.policy}).json()["runs"][0]["id"]
        with pytest.raises(RequestRefused, match="got 2 advantages for the 1 turns"):
            client.train([[run]], own.policy, advantages={run: (1.0, 2.0)})
    other = own.trainer_with(first_is_better)
    with pytest.raises(ConfigError, match="the advantage function's source"):
        await other.fit(own.rollout, SCENARIOS, steps=2)


def broken(*given: Any, **options: Any) -> Any:
    raise RuntimeError("the client's end")


# --- losses ---------------------------------------------------------------------------------------

REGISTERED = '[losses]\nclipped = "tests.support.own_losses:clipped"\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with ForkedServer(tmp_path_factory.mktemp("own-losses") / "data", settings=REGISTERED) as made:
        yield made


def test_a_registered_loss_makes_the_bytes_that_the_built_in_one_makes(server: LiveServer) -> None:
    with server.http() as http, ArtClient(server.base_url) as client:
        assert client.status().losses == ("clip", "gspo", "cispo", "dppo_tv", "clipped")
        runs = rewarded(http, (0.0, 1.0, 2.0))
        made: list[bytes] = []
        for loss in ("clip", "clipped", OwnLoss(name="clipped", options={"high": 1e-6})):
            config = TrainConfig(learning_rate=1e-3, loss=loss, optimizer_steps=2, max_kl=None)
            client.rollback("tiny", 0)
            result = client.wait(client.train([runs], "tiny", config, retrain=True))
            path = server.data_dir / "adapters" / "tiny" / str(result.version)
            made.append((path / "adapter_model.safetensors").read_bytes())
        assert made[0] == made[1]
        assert made[0] != made[2], "options count"
        with pytest.raises(InvalidRequest, match=r"'clippd', expected one of .*'clipped'"):
            client.train([runs], "tiny", TrainConfig(loss="clippd"), retrain=True)
        wrong = TrainConfig(loss=OwnLoss(name="clipped", options={"bound": 1.0}))
        with pytest.raises(JobFailed, match=r"got options=.*bound.* for the loss 'clipped'"):
            client.wait(client.train([runs], "tiny", wrong, retrain=True))


async def test_a_fit_refuses_a_loss_that_is_not_there_before_its_first_run(
    server: LiveServer, tmp_path: Path
) -> None:
    began: list[object] = []
    trainer = trainer_of(server, tmp_path, "mistaken", config=TrainConfig(loss="gsop"))
    with pytest.raises(ConfigError, match="got the loss 'gsop' for 'mistaken', expected one of"):
        await trainer.fit(began.append, SCENARIOS, steps=1)
    assert not began


def test_a_loss_that_cannot_be_imported_ends_the_start(tmp_path: Path) -> None:
    settings = '[losses]\nmine = "no_such_package.losses:mine"\n'
    refused = ForkedServer(tmp_path / "data", settings=settings).refusal()
    assert "[losses] mine = 'no_such_package.losses:mine' cannot be imported" in refused
