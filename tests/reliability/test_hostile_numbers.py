"""Whatever number enters is refused in words, or left out and counted; no weight ever stops being
finite.

A number enters by the HTTP routes, from engines, from evaluators and rollouts, and from files of
traces. `HOSTILE` are those that break arithmetic; each is put at every place where one is read.
Rewards and advantages of any size move a policy no further than those of one: the gradient is cut
at `max_grad_norm`, AdamW's step is bounded by the learning rate, and by `max_kl`, too.
"""

import copy
import json
import math
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
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
from langchain_art.wire import KLPenalty, TrainConfig, TrainResult, Trajectory, TrajectoryGroup
from langchain_art.wire.identifiers import MAX_REWARD
from langchain_art_server.backends.models.adapter_files import OPTIMIZER_FILE, WEIGHTS_FILE
from langchain_art_server.jobs.swap_check import MOST_RATES
from tests.support.live_server import FaultyServer, LiveServer
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.steps_of_a_fit import ended, rewarded

NAN, INF = math.nan, math.inf
HOSTILE: list[Any] = [
    *(NAN, INF, -INF, 1e308, -1e308, 1.7e308, 5e-324, -0.0, 0, -1, 10**400, -(2**63), 2**64),
    *(1e9, -1e9, 1.0001e9, 1e38, 0.1, 1.0, True, False),
    *("NaN", "1.0", "", None, [], [1.0], [NAN], {}, {"value": 1.0}),
]
#: Of these, the ones that are a reward: the others must never be taken for one.
REWARDS = [5e-324, -0.0, 0, -1, 1e9, -1e9, 0.1, 1.0]
NUMBERS = count(30, 2_000)
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
        assert found.first_error
        assert not is_reward(value) or (place == "score" and value is None)


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


# --- HTTP ----------------------------------------------------------------------------------------


class Door:
    """A server, a policy of its own, and runs of it that every job trains anew."""

    def __init__(self, server: LiveServer, http: httpx.Client) -> None:
        self.server, self.http = server, http
        self.policy = f"hostile-{uuid.uuid4().hex[:8]}"
        http.post("/v1/policies", json={"name": self.policy, "lora": {"rank": 2, "alpha": 4.0}})
        self.runs = [f"{self.policy}-{i}" for i in range(2)]
        self.calls = [self.say(run, seed) for seed, run in enumerate(self.runs)]
        for run, reward in zip(self.runs, (0.0, 1.0), strict=True):
            http.put(f"/v1/trajectories/{run}/reward", json={"reward": reward}).raise_for_status()
        self.trained = self.refused = 0

    def say(self, run: str, seed: int) -> str:
        body = {"model": self.policy, "messages": SAY, "max_tokens": 4, "seed": seed}
        answer = self.http.post("/v1/chat/completions", json=body | {"art": {"trajectory_id": run}})
        return answer.raise_for_status().json()["id"]

    def requests(self) -> list[tuple[str, str, dict[str, Any]]]:
        """A valid request for each way in which numbers enter, with all that it may have."""
        one, other = self.runs
        call = {"call_id": self.calls[0], "messages": SAY, "reward": 0.5, "latency": 0.1}
        call |= {"started_at": 1.0, "step": 1, "attempt": 1}
        call |= {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        run = {
            "id": "x",
            "turns": [call, call | {"extends": 0}],
            "reward": 0.5,
            "scores": {"a": 1.0},
        }
        group = {"id": "x", "trajectories": [run, run | {"id": "y"}]}
        train: dict[str, Any] = {"policy": self.policy, "groups": [[one, other]], "retrain": True}
        train |= {"schedule_step": 1, "seconds": {"rollout": 1.0, "judge": 1.0}}
        given = {one: [[0.5, 0.5, -0.5, 0.1]], other: [-1.0]}
        said = {"source": "api", "trajectory": one, "at": 1.5, "id": f"{one}-r", "kind": "score"}
        said |= {"name": "x", "value": 1.0}
        chat = {"model": self.policy, "messages": SAY, "max_tokens": 2, "temperature": 1.0}
        chat |= {"top_p": 0.9, "top_k": 3, "seed": 1, "n": 1, "top_logprobs": 1, "logprobs": True}
        chat |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        lora = {"rank": 2, "alpha": 4.0, "seed": 0}
        learn = TrainConfig(
            learning_rate=1e-3,
            max_kl=0.1,
            entropy_bonus=0.001,
            kl=KLPenalty(estimator="k3", coefficient=0.1),
        ).model_dump(mode="json")
        optimizer = {name: learn[name] for name in ("schedule", "max_grad_norm", "optimizer_steps")}
        optimizer |= {"learning_rate": 1e-3, "tokens_per_microbatch": 4096}
        prefers = {"kind": "dpo", "beta": 0.1, "learning_rate": 1e-3, "max_grad_norm": 1.0}
        plain = {"policy": self.policy, "groups": [[one, other]]}
        train_by = {"config": learn, "rewards": {one: 1.0}, "turns": {self.calls[1]: 0.0}}
        return [
            ("POST", "/v1/trajectories", run),
            ("POST", "/v1/groups", group),
            (
                "PUT",
                f"/v1/trajectories/{self.policy}-new/reward",
                {"reward": 0.5, "scores": {"a": 1.0}},
            ),
            ("PUT", f"/v1/trajectories/{one}/reward", {"turns": {self.calls[0]: 0.5}}),
            ("PUT", "/v1/reviews", {"reviews": [said]}),
            ("POST", "/v1/policies", {"name": self.policy, "lora": lora}),
            ("POST", f"/v1/policies/{self.policy}/rollback", {"version": 0}),
            ("POST", "/v1/chat/completions", chat),
            ("POST", "/v1/train", train | train_by),
            ("POST", "/v1/train", train | {"advantages": given, "config": {"learning_rate": 1e-3}}),
            ("POST", "/v1/train", plain | {"config": optimizer | {"kind": "sft"}}),
            ("POST", "/v1/train", plain | {"config": prefers}),
        ]

    def send(self, method: str, path: str, body: dict[str, Any]) -> None:
        """It is refused in words, or taken; a job that is taken ends, and harms no weight."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": uuid.uuid4().hex}
        text = json.dumps(body).encode()  # with NaN and Infinity, as Python writes them
        answer = self.http.request(method, path, content=text, headers=headers)
        if answer.status_code >= 400:
            assert answer.status_code < 500, answer.text
            assert answer.json()["error"]["message"], answer.text
            self.refused += 1
            return
        if path == "/v1/train":
            self.trained += 1
            job = ended(self.http, answer.json())
            assert job["state"] == "succeeded" or job["error"], job
            version = job["result"]["version"] if job["state"] == "succeeded" else 0
            files = self.server.data_dir / "adapters" / self.policy / str(version)
            for name in (WEIGHTS_FILE, OPTIMIZER_FILE)[: 2 if version else 1]:
                weights = load_file(files / name)
                assert all(np.isfinite(one).all() for one in weights.values()), (name, body)
            back = {"version": 0}
            self.http.post(f"/v1/policies/{self.policy}/rollback", json=back).raise_for_status()


def places(root: Any) -> Iterator[tuple[Any, Any]]:
    """Parent and key of every number below."""
    for key in list(root) if isinstance(root, dict) else range(len(root)):
        if isinstance(root[key], dict | list):
            yield from places(root[key])
        elif isinstance(root[key], int | float) and not isinstance(root[key], bool):
            yield root, key


@pytest.mark.soak("T4", NUMBERS, "requests with hostile numbers")
def test_a_number_of_a_request_is_refused_or_harms_no_weight(art_server: LiveServer) -> None:
    rng = random.Random(drawn_seed())
    with art_server.http() as http:
        restarts = http.get("/status").json()["engine_restarts"]  # other tests end its engines
        door = Door(art_server, http)
        requests = door.requests()
        for method, path, body in requests:
            door.send(method, path, body)
        assert door.trained == 4, "each is valid as it is"
        often = [one for one in requests if one[1] != "/v1/train"]  # a step takes longer
        sent = 0
        while sent < NUMBERS or (door.trained < 6 and sent < 10 * NUMBERS):
            sent += 1
            method, path, body = rng.choice(requests + 2 * often)
            body = copy.deepcopy(body)
            found = list(places(body))
            for parent, key in rng.sample(found, min(len(found), rng.choice((1, 1, 2)))):
                parent[key] = copy.deepcopy(rng.choice(HOSTILE))
                if isinstance(parent, list) and rng.random() < 0.2:  # one too many
                    parent.append(0.5)
            door.send(method, path, body)
        assert door.trained > 5, "some of them are numbers like any other"
        assert door.say(f"{door.policy}-last", 0)
        assert http.get("/status").json()["engine_restarts"] == restarts
        print(f"{door.refused} refused; {door.trained} jobs")  # noqa: T201 - for the report


# --- engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("logprob nan", "got the logprob nan, expected a finite number of at most 0"),
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
    with faulty_server.http() as http:
        faulty_server.fault(f"reply has {said}")
        try:
            door = Door(faulty_server, http)
        except httpx.HTTPStatusError as error:
            assert error.response.status_code < 500
            assert words in error.response.text
            return
        finally:
            faulty_server.fault("")
        body = {"policy": door.policy, "groups": [door.runs]}
        key = {"Idempotency-Key": uuid.uuid4().hex}
        job = ended(http, http.post("/v1/train", json=body, headers=key).json())
        assert job["state"] == "failed" and words in job["error"], job
        assert http.get(f"/v1/policies/{door.policy}").json()["version"] == 0


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
