"""Distillation on the policy's own runs: it comes near to its teacher, with rewards or without."""

import statistics
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from langchain_art import ArtClient, Distillation, SFTConfig, TrainConfig, capture
from langchain_art.errors import ConfigError
from langchain_art.wire import LoraConfig, TrainResult, Trajectory, TrajectoryGroup
from tests.support.chat_models import model_of
from tests.support.graphs import graph_of, node
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import trainer_of

SMALL = LoraConfig(rank=4, alpha=8.0)
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
