"""Rewards and advantages of any size move a policy no further than those of one.

The gradient is cut at `max_grad_norm`, AdamW's step is bounded by the learning rate, and with
`max_kl` by the divergence, too. What is beyond `MAX_REWARD` is refused.
"""

import math
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from langchain_art import ArtClient, TrainConfig
from langchain_art.errors import InvalidRequest
from langchain_art.wire import TrainResult
from langchain_art.wire.identifiers import MAX_REWARD
from langchain_art_server.backends.models.adapter_files import OPTIMIZER_FILE, WEIGHTS_FILE
from langchain_art_server.jobs.swap_check import MOST_RATES
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import rewarded

RATE = 3e-3
REWARDS = [1.0, 0.0, 0.75, 0.25]


class Bombed:
    """A policy whose rewards, or advantages, are those of the others times a number."""

    def __init__(self, server: LiveServer, client: ArtClient) -> None:
        self.server, self.client = server, client
        self.name = f"bombed-{uuid.uuid4().hex[:8]}"
        client.create_policy(self.name)

    def runs(self, scale: float) -> list[str]:
        """Four runs of one prompt, the same tokens for every policy at version 0."""
        found = [f"{self.name}-{uuid.uuid4().hex[:8]}" for _ in REWARDS]
        with self.server.http() as http:
            for seed, (run, reward) in enumerate(zip(found, REWARDS, strict=True)):
                asked = {"model": self.name, "max_tokens": 12, "seed": seed}
                rewarded(http, run, reward * scale, **asked)
        return found

    def by_rewards(self, scale: float, config: TrainConfig) -> TrainResult:
        runs = self.runs(scale)
        return self.client.wait(self.client.train([runs], self.name, config))

    def by_advantages(self, scale: float, config: TrainConfig) -> TrainResult:
        runs = self.runs(0.0)
        given = {run: ((reward - 0.5) * scale,) for run, reward in zip(runs, REWARDS, strict=True)}
        job = self.client.train([runs], self.name, config, advantages=given)
        return self.client.wait(job)

    def file(self, name: str, version: int = 1) -> dict[str, np.ndarray]:
        folder = Path(self.server.data_dir, "adapters", self.name, str(version))
        found = load_file(folder / name)
        assert all(np.isfinite(one).all() for one in found.values())
        return found


@pytest.fixture
def client(art_server: LiveServer) -> Iterator[ArtClient]:
    with ArtClient(art_server.base_url, art_server.api_key) as made:
        yield made


@pytest.mark.soak("T5", 3, "scales of rewards and advantages, up to 1e9")
def test_no_scale_moves_the_policy_further(art_server: LiveServer, client: ArtClient) -> None:
    config = TrainConfig(learning_rate=RATE)
    in_its_unit = TrainConfig(learning_rate=RATE, advantage="mean")
    plain, reward, advantage, most = (Bombed(art_server, client) for _ in range(4))
    expected = plain.by_rewards(1.0, in_its_unit).metrics
    found = [
        (1e6, reward, reward.by_rewards(1e6, in_its_unit)),
        (1e8, advantage, advantage.by_advantages(1e8, config)),
        (MAX_REWARD, most, most.by_advantages(MAX_REWARD, config)),
    ]
    weights = plain.file(WEIGHTS_FILE)
    for scale, bombed, result in found:
        assert result.version == 1
        assert result.metrics["grad_norm"] == pytest.approx(expected["grad_norm"] * scale, rel=1e-3)
        for name in ("weight_change", "probe_change"):
            assert result.metrics[name] == pytest.approx(expected[name], rel=1e-3)
        theirs = bombed.file(WEIGHTS_FILE)
        for name, mine in weights.items():  # Adam's eps is all that differs
            assert np.abs(theirs[name] - mine).max() < RATE * 0.05
        bombed.file(OPTIMIZER_FILE)
        after = bombed.by_rewards(1.0, config)  # what Adam remembers is the cut gradient
        assert 0 < after.metrics["weight_change"] < MOST_RATES * RATE
        assert math.isfinite(after.metrics["probe_change"])


def test_a_bomb_stays_within_the_trust_region(art_server: LiveServer, client: ArtClient) -> None:
    config = TrainConfig(learning_rate=0.1, optimizer_steps=4, max_kl=0.01)
    found = Bombed(art_server, client).by_advantages(1e8, config).metrics
    assert 0 <= found["step_kl"] <= 0.01 and found["step_kept"] < 1


def test_what_is_beyond_any_reward_is_refused(art_server: LiveServer, client: ArtClient) -> None:
    bombed = Bombed(art_server, client)
    with pytest.raises((InvalidRequest, ValueError), match=r"less than or equal to 1000000000"):
        client.reward(bombed.runs(0.0)[0], 1e10)
    with pytest.raises((InvalidRequest, ValueError), match=r"less than or equal to 1000000000"):
        bombed.by_advantages(1e10, TrainConfig(learning_rate=RATE))
    assert client.policy(bombed.name).version == 0
