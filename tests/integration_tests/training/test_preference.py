"""Preference steps and distillation through the real server: exact numbers and exact prompts."""

import itertools
import math
import statistics
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from langchain_art import (
    ArtClient,
    ChatART,
    Distillation,
    PreferenceConfig,
    SFTConfig,
    TrainConfig,
    capture,
)
from langchain_art.errors import ConfigError, NotFound
from langchain_art.wire import LoraConfig, TrainRequest, TrainResult, Trajectory, TrajectoryGroup
from tests.support.chat_models import model_of
from tests.support.graphs import graph_of, node
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import trainer_of

SMALL = LoraConfig(rank=4, alpha=8.0)
FAST = PreferenceConfig(learning_rate=3e-3, beta=0.5)
COLOURS = {"snow": "white", "coal": "black", "grass": "green"}


@pytest.fixture
def policy(client: ArtClient) -> str:
    return client.create_policy(f"p-{uuid.uuid4().hex[:12]}", SMALL).name


def talk(thing: str, answer: str) -> list[dict[str, Any]]:
    asked = {"role": "user", "content": f"Which colour has {thing}?"}
    return [asked, {"role": "assistant", "content": answer}]


def test_the_chosen_replies_become_likelier_than_the_rejected(
    client: ArtClient, policy: str
) -> None:
    pairs = [(talk(n, f"It is {c}."), talk(n, "I do not know.")) for n, c in COLOURS.items()]
    found = [client.wait(client.prefer(pairs, policy, FAST)).metrics for _ in range(6)]
    first, last = found[0], found[-1]
    # The adapter is new, so policy and base are one model.
    assert first["loss"] == first["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (first["preference_margin"], first["pairs_trained"]) == (pytest.approx(0, abs=1e-5), 3)
    assert [m["loss"] for m in found] == sorted((m["loss"] for m in found), reverse=True)
    assert last["preference_accuracy"] == 1.0 and last["loss"] < 0.3
    # What a step says of its own version is what the next one says of the version before it.
    for one, following in itertools.pairwise(found):
        for name in ("chosen_logprob", "rejected_logprob", "preference_loss", "preference_margin"):
            assert one[f"{name}_after"] == pytest.approx(following[name], abs=1e-6)
    gained = last["chosen_logprob"] - first["chosen_logprob"]
    assert gained > last["rejected_logprob"] - first["rejected_logprob"]
    assert client.policy(policy).version == 6


def test_a_correction_is_compared_on_the_tokens_that_were_sampled_from(
    art_server: LiveServer, client: ArtClient, policy: str
) -> None:
    model = ChatART(model=policy, base_url=art_server.base_url, max_tokens=12)
    with capture() as run:
        model.invoke("Which colour has snow?")
    client.post_trajectory(run.trajectory())
    call = client.call(run.turns[0].call_id or "")
    asked = run.trajectory().prompt(0)
    corrected = [*asked, {"role": "assistant", "content": "It is white."}]
    result = client.wait(client.prefer([(corrected, run.id)], policy, FAST))
    assert result.excluded == {}
    metrics = result.metrics
    assert metrics["rejected_logprob"] == pytest.approx(sum(call["logprobs"]), abs=1e-3)
    again = client.wait(client.prefer([(corrected, run.id)], policy, FAST)).metrics
    assert again["chosen_logprob"] > metrics["chosen_logprob"]
    assert again["preference_margin"] > 0.0 == pytest.approx(metrics["preference_margin"], abs=1e-5)


def test_several_turns_tools_and_a_run_in_several_pairs(client: ArtClient, policy: str) -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    looks = {"role": "assistant", "content": "", "tool_calls": [call]}
    seen = {"role": "tool", "tool_call_id": "1", "content": "White."}
    asked, answered = talk("snow", "It is white.")

    def conversation(*messages: dict[str, Any]) -> dict[str, Any]:
        return {
            "messages": [asked, *messages],
            "tools": [{"type": "function", "function": function}],
        }

    guessed = conversation({"role": "assistant", "content": "It is blue."})
    pairs = [
        (conversation(looks, seen, answered), guessed),  # two replies against one
        (conversation(answered), guessed),
        (guessed, guessed),
    ]
    found = [client.wait(client.prefer(pairs, policy, FAST, key=f"{policy}-{n}")) for n in range(3)]
    for result in found:
        assert result.excluded == {"groups.equal_pair": 1}
        assert (result.metrics["pairs_trained"], result.metrics["calls_trained"]) == (2.0, 5.0)
    assert found[2].metrics["loss"] < found[1].metrics["loss"] < found[0].metrics["loss"]
    again = client.wait(client.prefer(pairs, policy, FAST, key=f"{policy}-2"))
    assert again == found[2] and client.policy(policy).version == 3  # the key's step was taken once


def test_what_is_no_pair_is_refused(client: ArtClient, policy: str) -> None:
    with pytest.raises(ConfigError, match="expected at least one pair"):
        client.prefer([], policy)
    with pytest.raises(ConfigError, match=r"of the lengths \[1\]"):
        client.prefer([(talk("snow", "White."),)], policy)  # type: ignore[list-item]
    one, other = (Trajectory(id="same", output=said) for said in ("yes", "no"))
    with pytest.raises(ConfigError, match="two different runs with the id 'same'"):
        client.prefer([(one, other)], policy)
    for ids in (("a",), ("a", "b", "c"), ("a", "a")):
        with pytest.raises(ValueError, match="expected two for a preference step"):
            TrainRequest(policy=policy, groups=(ids,), config=FAST)
    with pytest.raises(ValueError, match="retrain=true for a step of the kind 'dpo'"):
        TrainRequest(policy=policy, groups=(("a", "b"),), config=FAST, retrain=True)
    with pytest.raises(NotFound, match="not-there"):
        client.prefer([("not-there", "neither")], policy)


# --- distillation on the policy's own runs --------------------------------------------------------


QUESTION = "Which colour has snow?"
SHOWN = [[{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It is white."}]]


@pytest.fixture(scope="module")
def teacher(client: ArtClient) -> str:
    """A version that answers the question, from a few supervised steps."""
    name = client.create_policy(new_id("t"), SMALL).name
    for _ in range(3):
        client.wait(client.sft(SHOWN, name, SFTConfig(learning_rate=3e-3)))
    return f"{name}@3"


class Student:
    """A new policy that is asked the question."""

    def __init__(self, server: LiveServer, client: ArtClient) -> None:
        self.client = client
        self.name = client.create_policy(new_id("s"), SMALL).name
        self._model = model_of(server, self.name)

    def step(self, distillation: Distillation) -> TrainResult:
        """A step on thirty new answers, which all get one reward."""

        def answer(_: int) -> Trajectory:
            with capture(scenario="snow") as run:
                self._model.invoke(QUESTION)
            run.reward = 0.5
            return run.trajectory()

        with ThreadPoolExecutor(30) as threads:
            runs = tuple(threads.map(answer, range(30)))
        group = TrajectoryGroup(id=uuid.uuid4().hex, trajectories=runs)
        config = TrainConfig(learning_rate=3e-3, distillation=distillation)
        job = self.client.train([group], self.name, config)
        self.credit = f"runs/{runs[0].id}/credit/{job.id}"
        return self.client.wait(job)


def test_a_student_whose_rewards_are_equal_comes_near_to_its_teacher(
    art_server: LiveServer, client: ArtClient, teacher: str
) -> None:
    student = Student(art_server, client)
    found = [student.step(Distillation(teacher=teacher)) for _ in range(12)]
    assert all(one.excluded == {} and one.metrics["calls_trained"] == 30 for one in found)
    page = art_server.base_url.removesuffix("/v1") + "/page"
    told = httpx.get(f"{page}/{student.credit}").json()
    assert (told["teacher"], told["reward"]) == (teacher, 0.5)
    apart = [one.metrics["kl_reference"] for one in found]
    assert apart[0] > 0.02, apart
    # One step may be far off by one rare answer.
    assert statistics.median(apart[-3:]) < 0.6 * statistics.median(apart[:3]), apart


async def test_a_fit_by_a_teacher_alone_takes_a_graph_without_an_evaluator(
    art_server: LiveServer, client: ArtClient, teacher: str, tmp_path: Path
) -> None:
    """Only an evaluation needs rewards; the teacher's adapter may have another shape."""
    shape = SMALL.model_copy(update={"rank": 2, "alpha": 2.0})
    policy = client.create_policy(new_id("s"), shape).name
    graph = graph_of(answer=node(model_of(art_server, policy))).compile()
    asked = [{"id": f"{n}", "messages": [("user", QUESTION)]} for n in range(2)]
    config = TrainConfig(distillation=Distillation(teacher=teacher, rewards=False))
    trainer = trainer_of(art_server, tmp_path, policy, group_size=2, config=config, lora=None)
    with pytest.raises(ConfigError, match="brings no reward"):
        await trainer.fit(graph, asked, steps=1, eval_scenarios=asked)
    found = await trainer.fit(graph, asked, steps=1)
    (step,) = found.history
    assert (step.reward_mean, step.excluded, step.version) == (None, {}, 1)
    assert step.metrics["calls_trained"] == 4 and step.metrics["kl_reference"] > 0


def test_retention_keeps_the_teacher_of_a_job_that_waits(
    art_server: LiveServer, client: ArtClient
) -> None:
    """The server keeps four versions; its policy trains on, before the job's turn comes."""
    teacher = client.create_policy(new_id("t"), SMALL).name
    client.wait(client.sft(SHOWN, teacher))
    student = client.create_policy(new_id("s"), SMALL).name
    with capture(scenario="snow") as run:
        model_of(art_server, student).invoke(QUESTION)
    group = TrajectoryGroup(id=uuid.uuid4().hex, trajectories=(run.trajectory(),))
    client.post_groups([group])
    before = [client.sft(SHOWN, teacher) for _ in range(7)]
    alone = Distillation(teacher=f"{teacher}@1", rewards=False)
    waiting = client.train([[run.id]], student, TrainConfig(distillation=alone))
    assert not client.job(before[-1].id).ended, "or the test tells nothing"
    assert client.wait(waiting).metrics["calls_trained"] == 1
