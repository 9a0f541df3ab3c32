"""Fits whose config names no rate: the steps' divergence sets it, also after a pause."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from langchain_art import Run, TrainConfig
from langchain_art.training import learning_rates
from langchain_art.training.records import FitResult
from langchain_art.wire import LoraConfig, default_learning_rate
from tests.support.chat_models import model_of
from tests.support.live_server import ForkedServer
from tests.support.steps_of_a_fit import new_id
from tests.support.tiny_models import save_model
from tests.support.trainers import asking, said, trainer_of

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
