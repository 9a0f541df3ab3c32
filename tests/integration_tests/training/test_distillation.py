"""Distillation on the policy's own runs: it comes near to its teacher, with rewards or without."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import httpx
import pytest

from langchain_art import ArtClient, ChatART, Distillation, SFTConfig, TrainConfig, capture
from langchain_art.errors import JobFailed
from langchain_art.wire import LoraConfig, TrainResult, Trajectory, TrajectoryGroup
from tests.support.live_server import LiveServer

SMALL = LoraConfig(rank=4, alpha=8.0)
QUESTION, ANSWER = "Which colour has snow?", "It is white."


@pytest.fixture(scope="module")
def client(art_server: LiveServer) -> Iterator[ArtClient]:
    with ArtClient(art_server.base_url) as made:
        yield made


@pytest.fixture(scope="module")
def teacher(client: ArtClient) -> str:
    """A version that answers the question, from a few supervised steps."""
    name = client.create_policy(f"t-{uuid.uuid4().hex[:12]}", SMALL).name
    shown = [[{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]]
    for _ in range(3):
        client.wait(client.sft(shown, name, SFTConfig(learning_rate=3e-3)))
    return f"{name}@3"


class Student:
    """A new policy that is asked the question."""

    def __init__(self, server: LiveServer, client: ArtClient) -> None:
        self.client = client
        self.name = client.create_policy(f"s-{uuid.uuid4().hex[:12]}", SMALL).name
        self._model = ChatART(model=self.name, base_url=server.base_url, max_tokens=8)

    def step(self, distillation: Distillation, reward: float | None = None) -> TrainResult:
        """A step on thirty new answers, which all get one reward, or none."""
        runs: list[Trajectory] = []
        for _ in range(30):
            with capture(scenario="snow") as run:
                self._model.invoke(QUESTION)
            run.reward = reward
            runs.append(run.trajectory())
        group = TrajectoryGroup(id=uuid.uuid4().hex, trajectories=tuple(runs))
        config = TrainConfig(learning_rate=3e-3, distillation=distillation)
        job = self.client.train([group], self.name, config)
        self.credit = f"runs/{runs[0].id}/credit/{job.id}"
        return self.client.wait(job)


@pytest.mark.parametrize("reward", [None, 0.5])
def test_a_student_comes_near_to_its_teacher(
    art_server: LiveServer, client: ArtClient, teacher: str, reward: float | None
) -> None:
    student = Student(art_server, client)
    distillation = Distillation(teacher=teacher, rewards=reward is not None)
    found = [student.step(distillation, reward) for _ in range(9)]
    assert all(one.excluded == {} and one.metrics["calls_trained"] == 30 for one in found)
    page = art_server.base_url.removesuffix("/v1") + "/page"
    told = httpx.get(f"{page}/{student.credit}").json()
    assert (told["teacher"], told["reward"]) == (teacher, reward)
    apart = [one.metrics["kl_reference"] for one in found]
    assert apart[0] > 0.02, apart
    assert sum(apart[-3:]) < 0.6 * sum(apart[:3]), apart


def test_without_its_teacher_an_equal_group_trains_nothing(
    art_server: LiveServer, client: ArtClient, teacher: str
) -> None:
    student = Student(art_server, client)
    unscored = student.step(Distillation(teacher=teacher), None)
    assert unscored.excluded["runs.unscored"] == 30 and unscored.metrics["calls_trained"] == 0
    with pytest.raises(JobFailed, match=r"t-.*@9.* expected a version of .* that is kept: \["):
        student.step(Distillation(teacher=f"{teacher.partition('@')[0]}@9"), 1.0)
