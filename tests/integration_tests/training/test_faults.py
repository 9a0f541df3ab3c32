"""Deliberate faults through the whole server: each stops the step, and says what it is.

`tests.support.faulty_server` is the real server with engines that can be led astray. Every
test makes a policy of its own, and sees that no version of it was published.
"""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from langchain_art import ArtClient, TrainConfig
from langchain_art.errors import Conflict, InvalidRequest, JobFailed, NotFound, RolloutFailed
from tests.support.chat_models import model_of
from tests.support.live_server import FaultyServer
from tests.support.steps_of_a_fit import new_id, ok
from tests.support.trainers import trainer_of

#: Few and large steps: after one of them the adapter is far from the base model.
BOLD = TrainConfig(learning_rate=1e-2, optimizer_steps=4, max_logprob_gap=0.02)


class Policy:
    """A policy of its own on the server, and what a trainer does with it."""

    def __init__(self, server: FaultyServer) -> None:
        self.server, self.name = server, new_id("p")
        self.client = ArtClient(server.base_url)
        self.client.create_policy(self.name)
        self._runs = 0

    def rollouts(self, **sampling: Any) -> list[list[str]]:
        """Two groups of runs, with the length of the reply for a reward."""
        numbers = range(self._runs, self._runs + 8)
        self._runs += 8
        with self.server.http() as http, ThreadPoolExecutor(8) as threads:
            ids = list(threads.map(lambda number: self._run(http, number, sampling), numbers))
        return [ids[:4], ids[4:]]

    def _run(self, http: httpx.Client, number: int, sampling: dict[str, Any]) -> str:
        run = f"{self.name}-{number}"
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [{"role": "user", "content": f"When is it? {number % 8 // 4}"}],
            "max_tokens": 24,
            "seed": number,
            "art": {"trajectory_id": run},
        }
        said = ok(http.post("/v1/chat/completions", json=body | sampling))
        self.client.reward(run, said["usage"]["completion_tokens"] + number % 8 / 100)
        return run

    def train(self, groups: list[list[str]], config: TrainConfig = BOLD) -> dict[str, float]:
        return self.client.wait(self.client.train(groups, self.name, config)).metrics

    def refusal(self, groups: list[list[str]], config: TrainConfig = BOLD) -> str:
        """The words with which the step ends; that nothing was published is checked."""
        before = self.versions()
        with pytest.raises(JobFailed) as refused:
            self.train(groups, config)
        assert self.versions() == before
        assert not list((self.server.data_dir / "adapters" / ".staging").iterdir())
        return str(refused.value)

    def versions(self) -> tuple[int, list[int], list[str]]:
        """What serves, what is kept, and what lies on the disk."""
        kept = [one.version for one in self.client.checkpoints(self.name)]
        folder = self.server.data_dir / "adapters" / self.name
        return self.client.policy(self.name).version, kept, sorted(p.name for p in folder.iterdir())


@pytest.fixture
def policy(faulty_server: FaultyServer) -> Iterator[Policy]:
    made = Policy(faulty_server)
    yield made
    made.client.close()
    faulty_server.fault("")


def test_without_a_fault_the_same_step_goes_through(policy: Policy) -> None:
    metrics = policy.train(policy.rollouts(temperature=0.7))
    assert metrics["logprob_gap_mean"] < 1e-5
    assert metrics["probe_change"] > 0.01
    assert policy.versions() == (1, [0, 1], ["0", "1"])


#: Its own change is below `max_logprob_gap` by far.
SMALL = TrainConfig(learning_rate=1e-3)
NOT_APPLIED = "The sampler does not apply the new adapter"
#: A fault of the sampler, whether a step was taken before, what is said, and what is special.
FAULTS: list[tuple[str, bool, tuple[str, ...], dict[str, Any]]] = [
    ("base model", True, ("nats apart per token", "sampler did not apply the adapter"), {}),
    ("base model", False, (NOT_APPLIED, "answers as its parent {policy}@0 does"), {}),
    ("base model", False, (NOT_APPLIED,), {"config": SMALL}),
    ("stale adapter", True, (NOT_APPLIED, "its parent {policy}@1"), {}),
    (
        *("temperature ignored", False),
        ("logprobs are those of temperature 1, while the calls say 0.5",),
        {"temperature": 0.5},
    ),
    ("shifted", False, ("shifted by one against the token ids",), {}),
]


@pytest.mark.parametrize(("fault", "later", "words", "special"), FAULTS)
def test_a_step_on_what_a_faulty_sampler_said_is_refused(
    policy: Policy, fault: str, later: bool, words: tuple[str, ...], special: dict[str, Any]
) -> None:
    if later:
        policy.train(policy.rollouts())
    policy.server.fault(fault)
    groups = policy.rollouts(temperature=special.get("temperature", 1.0))
    said = policy.refusal(groups, special.get("config", BOLD))
    assert [one for one in words if one.format(policy=policy.name) not in said] == [], said


def test_the_learner_saves_what_it_began_with(policy: Policy) -> None:
    policy.server.fault("learner saves its parent")
    groups = policy.rollouts()
    assert "The learner's step left the adapter as it was" in policy.refusal(groups)
    policy.server.fault("")
    policy.train(groups)
    policy.server.fault("learner saves its parent")
    assert "byte for byte" in policy.refusal(policy.rollouts())


def test_a_step_of_which_the_trust_region_keeps_nothing_is_said_and_no_fault(
    policy: Policy,
) -> None:
    policy.server.fault("nothing kept")
    job = policy.client.train(policy.rollouts(), policy.name, BOLD)
    said: list[str] = []
    result = policy.client.wait(job, on_event=lambda event: said.append(event.message))
    assert result.metrics["step_kept"] == result.metrics["probe_change"] == 0.0
    assert any("the new version answers exactly as its parent did" in one for one in said)
    assert policy.client.policy(policy.name).version == 1


def test_the_learner_saves_weights_that_no_step_makes(policy: Policy) -> None:
    groups = policy.rollouts()
    for saved, words in (
        ("nan", "holds numbers that are not finite"),
        ("-inf", "holds numbers that are not finite"),
        ("times 10", "expected at most"),  # its answers are finite
        ("times 1e30", "expected at most"),
    ):
        policy.server.fault(f"learner saves weights {saved}")
        said = policy.refusal(groups)
        assert words in said and "Nothing was published" in said
    policy.server.fault("")
    assert 0 < policy.train(groups)["weight_change"] < 3 * 4 * 1e-2
    assert policy.versions() == (1, [0, 1], ["0", "1"])


def test_a_reward_is_not_a_number(policy: Policy, tmp_path: Path) -> None:
    """It is no reward of 0, and no reward at all: the rollout failed, and the run says why."""
    [one, *_], _ = policy.rollouts()
    with policy.server.http() as http:
        headers = {"Content-Type": "application/json"}
        path = f"/v1/trajectories/{one}/reward"
        answer = http.put(path, content='{"reward": NaN}', headers=headers)
    assert answer.status_code == 400
    assert "expected finite numbers, and null for no score" in answer.text
    with pytest.raises((InvalidRequest, ValueError), match="finite"):
        policy.client.reward(one, math.inf)
    model = model_of(policy.server, policy.name)

    def rollout(scenario: str) -> float:
        model.invoke(scenario)
        return math.nan

    before = policy.versions()
    options = {"group_size": 2, "groups_per_step": 1, "lora": None}
    trainer = trainer_of(policy.server, tmp_path, policy.name, **options)
    with pytest.raises(RolloutFailed, match="nan, expected a finite number"):
        trainer.fit_sync(rollout, ["When?"], steps=1)
    assert policy.versions() == before


def test_without_space_the_job_is_left_to_the_same_key(policy: Policy) -> None:
    groups = policy.rollouts()
    policy.server.fault("no space")
    before = policy.versions()
    job = policy.client.train(groups, policy.name, BOLD, key=f"key-{policy.name}")
    with pytest.raises(JobFailed, match=r"No space left on device.*the same Idempotency-Key"):
        policy.client.wait(job)
    assert policy.versions() == before
    policy.server.fault("")
    again = policy.client.train(groups, policy.name, BOLD, key=f"key-{policy.name}")
    assert again.id == job.id
    assert policy.client.wait(again).version == 1
    done = policy.client.job(job.id)
    assert (done.state, done.attempts, done.retryable) == ("succeeded", 2, False)


def test_a_job_that_is_cancelled_publishes_nothing_and_does_not_block_the_next(
    policy: Policy,
) -> None:
    policy.server.fault("learner waits")
    before, groups = policy.versions(), policy.rollouts()
    running = policy.client.train(groups, policy.name, BOLD)
    waiting = policy.client.train(policy.rollouts(), policy.name, BOLD)
    while policy.client.job(running.id).state == "queued":
        time.sleep(0.02)
    assert policy.client.cancel(waiting).attempts == 0
    assert policy.client.cancel(running).state == "cancelled"
    assert policy.client.cancel(running.id).state == "cancelled"
    for job in (waiting, running):
        with pytest.raises(JobFailed, match="was cancelled; the policy is as it was"):
            policy.client.wait(job)
    assert policy.versions() == before
    assert not list((policy.server.data_dir / "adapters" / ".staging").iterdir())
    policy.server.fault("")
    assert policy.train(groups)["tokens_trained"] > 0
    assert policy.versions()[0] == 1
    with pytest.raises(Conflict, match="has succeeded"):
        policy.client.cancel(policy.client.jobs(policy.name)[-1])


def test_a_policy_is_deleted_and_made_again_without_using_a_name_twice(policy: Policy) -> None:
    groups = policy.rollouts()
    policy.server.fault("learner waits")
    job = policy.client.train(groups, policy.name, BOLD)
    with pytest.raises(Conflict, match=job.id):
        policy.client.delete_policy(policy.name)
    with pytest.raises(Conflict, match=job.id):
        policy.client.delete_trajectory(groups[0][0])
    policy.server.fault("")
    policy.client.wait(job)
    assert policy.client.delete_policy(policy.name) == policy.name
    with pytest.raises(NotFound):
        policy.client.policy(policy.name)
    assert not [name for name in policy.client.models() if name.startswith(policy.name)]
    policy.client.create_policy(policy.name)
    policy.train(policy.rollouts())
    assert policy.versions()[:2] == (2, [0, 2]), "a name is used once"


def test_a_version_that_cannot_be_served_is_withdrawn(policy: Policy) -> None:
    policy.train(policy.rollouts())
    policy.server.fault("published version refused")
    groups = policy.rollouts()
    assert f"{policy.name}@2 is not to be loaded" in policy.refusal(groups)
    policy.server.fault("")
    policy.train(groups)
    assert policy.versions() == (3, [0, 1, 3], ["0", "1", "3"]), "a name is used once"
