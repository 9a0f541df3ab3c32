"""A loss that the server's operator has registered, from `server.toml` to the adapter's bytes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from langchain_art import ArtClient, OwnLoss, TrainConfig
from langchain_art.errors import ConfigError, InvalidRequest, JobFailed
from tests.integration_tests.training.test_fit_graphs import QUESTIONS, trainer_of
from tests.integration_tests.training.test_trainable import runs_of
from tests.support.live_server import ForkedServer, LiveServer

REGISTERED = '[losses]\nclipped = "tests.support.own_losses:clipped"\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with ForkedServer(tmp_path_factory.mktemp("own-losses") / "data", settings=REGISTERED) as made:
        yield made


def test_a_registered_loss_makes_the_bytes_that_the_built_in_one_makes(server: LiveServer) -> None:
    with server.http() as http, ArtClient(server.base_url) as client:
        assert client.status().losses == ("clip", "gspo", "cispo", "dppo_tv", "clipped")
        runs = runs_of(http, (0.0, 1.0, 2.0))
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
        await trainer.fit(began.append, QUESTIONS, steps=1)
    assert not began


def test_a_loss_that_cannot_be_imported_ends_the_start(tmp_path: Path) -> None:
    settings = '[losses]\nmine = "no_such_package.losses:mine"\n'
    refused = ForkedServer(tmp_path / "data", settings=settings).refusal()
    assert "[losses] mine = 'no_such_package.losses:mine' cannot be imported" in refused
