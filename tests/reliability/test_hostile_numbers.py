"""Whatever number enters is refused in words, or left out and counted; no weight ever stops being
finite.

A number enters from engines, from evaluators and rollouts, from files of traces, and by the HTTP
routes (`test_mutations`). `HOSTILE` are those that break arithmetic.
Rewards and advantages of any size move a policy no further than those of one: the gradient is cut
at `max_grad_norm`, AdamW's step is bounded by the learning rate, and by `max_kl`, too.
"""

import json
import math
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from langchain_art import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.evaluators import Score
from langchain_art.evaluators.scoring import score_groups
from langchain_art.rollout.gather import gather
from langchain_art.traces.from_jsonl import read_file
from langchain_art.tracing.scope import capture
from langchain_art.wire import TrainConfig, TrainResult, Trajectory, TrajectoryGroup
from langchain_art.wire.identifiers import MAX_REWARD
from langchain_art_server.backends.models.adapter_files import OPTIMIZER_FILE, WEIGHTS_FILE
from langchain_art_server.jobs.swap_check import MOST_RATES
from tests.support.live_server import FaultyServer, LiveServer
from tests.support.steps_of_a_fit import rewarded, trained

NAN, INF = math.nan, math.inf
HOSTILE: list[Any] = [
    *(NAN, INF, -INF, 1e308, -1e308, 1.7e308, 5e-324, -0.0, 0, -1, 10**400, -(2**63), 2**64),
    *(1e9, -1e9, 1.0001e9, 1e38, 0.1, 1.0, True, False),
    *("NaN", "1.0", "", None, [], [1.0], [NAN], {}, {"value": 1.0}),
]
#: Of these, the ones that are a reward: the others must never be taken for one.
REWARDS = [5e-324, -0.0, 0, -1, 1e9, -1e9, 0.1, 1.0]
SAY = [{"role": "user", "content": "When is it?"}]


def is_reward(value: Any) -> bool:
    return value is None or any(value is one for one in REWARDS)


# --- evaluators, rollouts, files of traces -------------------------------------------------------


def group(name: str = "g") -> TrajectoryGroup:
    runs = tuple(Trajectory(id=f"{name}-{i}", reward=0.5) for i in range(2))
    return TrajectoryGroup(id=name, trajectories=runs)


@pytest.mark.parametrize("place", ["number", "value", "part", "reward", "score", "turn"])
@pytest.mark.parametrize("value", HOSTILE, ids=repr)
async def test_what_an_evaluator_says_is_a_reward_or_the_group_is_not_judged(
    place: str, value: Any
) -> None:
    """The other group is trained: one judge's overflow costs its group alone."""

    def judge(asked: TrajectoryGroup) -> Any:
        if asked.id == "good":
            return [0.0, 1.0]
        if place == "number":
            return [value, 0.0]
        if place in ("value", "part"):
            return [Score(value) if place == "value" else Score(0.0, parts={"a": value})] * 2
        change = {"scores": {"x": value}} if place == "score" else {"reward": value}
        runs = [run.model_copy(update=change) for run in asked.trajectories]
        if place == "turn":
            turn = Trajectory(id="t", turns=({"messages": SAY},)).turns[0]  # pyright: ignore[reportArgumentType]
            turns = (turn.model_copy(update=change),)
            runs = [run.model_copy(update={"turns": turns}) for run in asked.trajectories]
        return asked.model_copy(update={"trajectories": tuple(runs)})

    try:
        found = await score_groups([group("good"), group("odd")], judge)
    except ConfigError as error:
        assert "expected" in str(error)
        return
    sent = [TrajectoryGroup.model_validate_json(one.model_dump_json()) for one in found.groups]
    assert sent == found.groups, "what was scored can be stored and sent"
    assert len(found.groups) + found.unjudged == 2 and found.groups[0].id == "good"
    if found.unjudged:
        by_score = place in ("value", "part")
        assert found.first_error
        assert not by_score or "expected a finite number" in found.first_error
        assert not is_reward(value) or (value is None and (by_score or place == "score"))


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
async def test_what_a_rollout_says_is_a_reward_or_its_run_failed(value: Any) -> None:
    async def rollout(scenario: str) -> Any:
        if scenario == "good":
            return 1.0
        async with capture() as run:
            run.reward = value
        return run

    found = await gather(rollout, ["good", "odd"], group_size=1, concurrency=1, max_failed=0.5)
    good, odd = (one.trajectories[0] for one in found.groups)
    assert good.reward == 1.0
    assert Trajectory.model_validate_json(odd.model_dump_json()) == odd
    if odd.status == "failed":
        assert odd.reward is None and odd.error and "expected" in odd.error
    else:
        assert odd.reward is None or abs(odd.reward) <= MAX_REWARD


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_a_traces_score_is_a_reward_or_the_trace_is_left_out(value: Any, tmp_path: Path) -> None:
    said = [*SAY, {"role": "assistant", "content": "In May."}]
    run = {"id": "r", "run_type": "llm", "inputs": {"messages": SAY}, "outputs": said[1]}
    run |= {"feedback_stats": {"human_reward": {"avg": value}}}
    for line in ({"messages": said, "score": value}, run):
        (tmp_path / "traces.jsonl").write_text(json.dumps(line) + "\n")
        read = read_file(tmp_path / "traces.jsonl")
        assert len(read.traces) + sum(read.unreadable.values()) == 1
        for trace in read.traces:
            assert trace.score is None or abs(trace.score) <= MAX_REWARD


# --- engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("logprob nan", "got the logprob nan, expected a finite number of at most 0"),
        ("logprob -inf", "got the logprob -inf"),
        ("logprob 1e-3", "got the logprob 0.001"),
        ("logprob -1e308", "nats apart per token"),
        ("token 70000", "got token id 70000, expected 0 to"),
        ("token -1", "got a negative token id"),
        ("a logprob too few", "logprobs, expected as many"),
    ],
)
def test_what_an_engine_says_wrongly_is_not_trained(
    faulty_server: FaultyServer, said: str, words: str
) -> None:
    runs = [f"said-{uuid.uuid4().hex}" for _ in range(2)]
    with faulty_server.http() as http:
        before = http.get("/v1/policies/tiny").json()["version"]
        faulty_server.fault(f"reply has {said}")
        try:
            for reward, run in enumerate(runs):
                body = {"model": "tiny", "messages": SAY, "art": {"trajectory_id": run}}
                answer = http.post("/v1/chat/completions", json=body | {"max_tokens": 4})
                if answer.is_error:
                    assert answer.status_code < 500 and words in answer.text
                    return
                http.put(f"/v1/trajectories/{run}/reward", json={"reward": reward})
        finally:
            faulty_server.fault("")
        job = trained(http, [runs])
        assert job["state"] == "failed" and words in job["error"], job
        assert http.get("/v1/policies/tiny").json()["version"] == before


# --- sizes ---------------------------------------------------------------------------------------

RATE = 3e-3
SIZES = [1.0, 0.0, 0.75, 0.25]


class Bombed:
    """A policy whose rewards, or advantages, are those of the others times a number."""

    def __init__(self, server: LiveServer) -> None:
        self.server, self.client = server, ArtClient(server.base_url, server.api_key)
        self.name = f"bombed-{uuid.uuid4().hex[:8]}"
        self.client.create_policy(self.name)

    def runs(self, scale: float) -> list[str]:
        """Four runs of one prompt, the same tokens for every policy at version 0."""
        found = [f"{self.name}-{uuid.uuid4().hex[:8]}" for _ in SIZES]
        with self.server.http() as http:
            for seed, (run, reward) in enumerate(zip(found, SIZES, strict=True)):
                asked = {"model": self.name, "max_tokens": 12, "seed": seed}
                rewarded(http, run, reward * scale, **asked)
        return found

    def by_rewards(self, scale: float, config: TrainConfig) -> TrainResult:
        runs = self.runs(scale)
        return self.client.wait(self.client.train([runs], self.name, config))

    def by_advantages(self, scale: float, config: TrainConfig) -> TrainResult:
        runs = self.runs(0.0)
        given = {run: ((reward - 0.5) * scale,) for run, reward in zip(runs, SIZES, strict=True)}
        job = self.client.train([runs], self.name, config, advantages=given)
        return self.client.wait(job)

    def file(self, name: str, version: int = 1) -> dict[str, np.ndarray]:
        folder = Path(self.server.data_dir, "adapters", self.name, str(version))
        found = load_file(folder / name)
        assert all(np.isfinite(one).all() for one in found.values())
        return found


@pytest.mark.soak("T5", 3, "scales of rewards and advantages, up to 1e9")
def test_no_scale_moves_the_policy_further(art_server: LiveServer) -> None:
    config = TrainConfig(learning_rate=RATE)
    in_its_unit = TrainConfig(learning_rate=RATE, advantage="mean")
    plain, reward, advantage, most = (Bombed(art_server) for _ in range(4))
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


def test_a_bomb_stays_within_the_trust_region(art_server: LiveServer) -> None:
    config = TrainConfig(learning_rate=0.1, optimizer_steps=4, max_kl=0.01)
    found = Bombed(art_server).by_advantages(1e8, config).metrics
    assert 0 <= found["step_kl"] <= 0.01 and found["step_kept"] < 1
