"""Policies of one fit with configs of their own, and policies that play and do not learn."""

from pathlib import Path
from typing import Any

import pytest

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ConfigError
from langchain_art.wire import ClippedRatio, LRSchedule, ServerStatus, TrainConfig
from tests.integration_tests.training.test_collapse import RATE, Falling, names
from tests.integration_tests.training.test_fit_graphs import (
    QUESTIONS,
    client_of,
    model_of,
    name,
    trainer_of,
    two_nodes,
)
from tests.support.live_server import LiveServer
from tests.support.trainers import said


async def test_each_policy_has_its_rate_its_schedule_and_its_loss(
    art_server: LiveServer, tmp_path: Path
) -> None:
    writer, critic = name(), name()
    graph = two_nodes(model_of(art_server, writer), model_of(art_server, critic))
    config = {
        writer: TrainConfig(learning_rate=1e-4, schedule=LRSchedule(warmup_steps=2)),
        critic: TrainConfig(learning_rate=3e-4, loss=ClippedRatio(aggregation="run")),
    }
    found = await trainer_of(art_server, tmp_path, writer, critic, config=config).fit(
        graph, QUESTIONS, steps=2
    )
    rates = [
        (step.metrics[f"{writer}/learning_rate"], step.metrics[f"{critic}/learning_rate"])
        for step in found.history
    ]
    assert rates == [pytest.approx((0.5e-4, 3e-4)), pytest.approx((1e-4, 3e-4))]
    equal = {writer: config[writer], critic: config[writer]}
    with pytest.raises(ConfigError, match=rf"config.{critic}.learning_rate 0.0003 -> 0.0001"):
        await trainer_of(art_server, tmp_path, writer, critic, config=equal).fit(
            graph, QUESTIONS, steps=2
        )


async def test_a_policy_without_a_config_plays_and_does_not_learn(
    art_server: LiveServer, tmp_path: Path
) -> None:
    writer, critic = name(), name()
    graph = two_nodes(model_of(art_server, writer), model_of(art_server, critic))
    both = trainer_of(art_server, tmp_path / "both", writer, critic)
    assert (await both.fit(graph, QUESTIONS, steps=1)).versions == {writer: 1, critic: 1}
    frozen: dict[str, Any] = {writer: TrainConfig(), critic: None}
    trainer = trainer_of(art_server, tmp_path / "one", writer, critic, config=frozen)
    found = await trainer.fit(graph, QUESTIONS, steps=2, eval_scenarios=QUESTIONS[:2])
    assert found.adapter == f"{writer}@3"
    assert [e.versions for e in found.evals] == [
        (f"{writer}@1", f"{critic}@1"),
        (f"{writer}@3", f"{critic}@1"),
    ]
    assert all(step.results.keys() == {writer} for step in found.history)
    with client_of(art_server) as client:
        assert (len(client.jobs(writer)), len(client.jobs(critic))) == (3, 1)
    again = await trainer.fit(graph, QUESTIONS, steps=1, fresh=True)
    assert again.versions == {writer: 4}
    with client_of(art_server) as client:
        assert client.policy(critic).version == 1, "what does not learn is not rolled back either"


async def test_a_rollback_lowers_each_policys_rate(art_server: LiveServer, tmp_path: Path) -> None:
    first, second, frozen = names(3)
    config = {
        first: TrainConfig(learning_rate=RATE),
        second: TrainConfig(learning_rate=RATE / 3),
        frozen: None,
    }
    falling = Falling(art_server, tmp_path, (first, second, frozen), options={"config": config})
    found = await falling.fit(4)
    (done,) = found.rollbacks
    assert done.learning_rate == pytest.approx({first: RATE / 3, second: RATE / 9})
    assert done.versions.keys() == {first, second}
    last = found.history[-1].metrics
    assert last[f"{first}/learning_rate"] == pytest.approx(RATE / 3)
    assert last[f"{second}/learning_rate"] == pytest.approx(RATE / 9)
    assert f"{RATE / 3:.3g} ({first}) and {RATE / 9:.3g} ({second}) from here on" in falling.said


async def test_more_policies_than_the_sampler_computes_at_once_are_refused(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is vLLM's, so that the real server's status is given one here."""
    status, policies = AsyncArtClient.status, [name(), name()]

    async def bounded(self: AsyncArtClient, **changes: int) -> ServerStatus:
        found = await status(self)
        assert found.max_loras is None
        return found.model_copy(update=changes)

    for changes, words in (
        ({"max_loras": 1}, "got 2 policies, and .* computes 1 adapters at once, .* max_loras = 2"),
        ({"max_policies": 1}, r"would have to be made, and the server has \d+ of at most 1"),
    ):
        with monkeypatch.context() as patch:

            async def told(self: AsyncArtClient, changes: dict[str, int] = changes) -> ServerStatus:
                return await bounded(self, **changes)

            patch.setattr(AsyncArtClient, "status", told)
            with pytest.raises(ConfigError, match=words):
                await trainer_of(art_server, tmp_path, *policies).fit(
                    lambda _: 1.0, QUESTIONS, steps=1
                )
    with client_of(art_server) as client:
        assert not {one.name for one in client.policies()} & set(policies), "none was made"


async def test_a_policy_that_is_made_is_said_once(art_server: LiveServer, tmp_path: Path) -> None:
    """A misspelled name would make one without a word."""
    policy = name()
    trainer = trainer_of(art_server, tmp_path, policy)
    for fresh in (True, False):
        await trainer.fit(lambda _: 1.0, QUESTIONS, steps=1, fresh=fresh)
    assert said(trainer).count(f"no policy {policy!r} yet: it is made, from the base") == 1
