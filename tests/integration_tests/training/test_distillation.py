"""Distillation on the policy's own runs: it comes near to its teacher, with rewards or without."""

import io
import statistics
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph.graph import START, MessagesState, StateGraph
from rich.console import Console

from langchain_art import ArtClient, ChatART, Distillation, SFTConfig, TrainConfig, Trainer, capture
from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art.wire import LoraConfig, TrainResult, Trajectory, TrajectoryGroup
from tests.support.live_server import LiveServer

SMALL = LoraConfig(rank=4, alpha=8.0)
QUESTION, ANSWER = "Which colour has snow?", "It is white."


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

        def answer(_: int) -> Trajectory:
            with capture(scenario="snow") as run:
                self._model.invoke(QUESTION)
            run.reward = reward
            return run.trajectory()

        with ThreadPoolExecutor(30) as threads:
            runs = tuple(threads.map(answer, range(30)))
        group = TrajectoryGroup(id=uuid.uuid4().hex, trajectories=runs)
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
    found = [student.step(distillation, reward) for _ in range(12)]
    assert all(one.excluded == {} and one.metrics["calls_trained"] == 30 for one in found)
    page = art_server.base_url.removesuffix("/v1") + "/page"
    told = httpx.get(f"{page}/{student.credit}").json()
    assert (told["teacher"], told["reward"]) == (teacher, reward)
    apart = [one.metrics["kl_reference"] for one in found]
    assert apart[0] > 0.02, apart
    # One step may be far off by one rare answer.
    assert statistics.median(apart[-3:]) < 0.6 * statistics.median(apart[:3]), apart


def test_without_its_teacher_an_equal_group_trains_nothing(
    art_server: LiveServer, client: ArtClient, teacher: str
) -> None:
    student = Student(art_server, client)
    unscored = student.step(Distillation(teacher=teacher), None)
    assert unscored.excluded["runs.unscored"] == 30 and unscored.metrics["calls_trained"] == 0
    with pytest.raises(InvalidRequest, match=r"t-.*@9.* expected a version of .* that is kept: \["):
        student.step(Distillation(teacher=f"{teacher.partition('@')[0]}@9"), 1.0)


async def test_a_fit_by_a_teacher_alone_takes_a_graph_without_an_evaluator(
    art_server: LiveServer, client: ArtClient, teacher: str, tmp_path: Path
) -> None:
    """Only an evaluation needs rewards; the teacher's adapter may have another shape."""
    shape = SMALL.model_copy(update={"rank": 2, "alpha": 2.0})
    policy = client.create_policy(f"s-{uuid.uuid4().hex[:12]}", shape).name
    model = ChatART(model=policy, base_url=art_server.base_url, max_tokens=8)

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer").compile()
    asked = [{"id": f"{n}", "messages": [("user", QUESTION)]} for n in range(2)]
    trainer = Trainer(
        model,
        group_size=2,
        groups_per_step=2,
        config=TrainConfig(distillation=Distillation(teacher=teacher, rewards=False)),
        out_dir=tmp_path / "fit",
        console=Console(file=io.StringIO()),
    )
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
    teacher = client.create_policy(f"t-{uuid.uuid4().hex[:12]}", SMALL).name
    shown = [[{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]]
    client.wait(client.sft(shown, teacher))
    student = client.create_policy(f"s-{uuid.uuid4().hex[:12]}", SMALL).name
    with capture(scenario="snow") as run:
        ChatART(model=student, base_url=art_server.base_url, max_tokens=8).invoke(QUESTION)
    group = TrajectoryGroup(id=uuid.uuid4().hex, trajectories=(run.trajectory(),))
    client.post_groups([group])
    before = [client.sft(shown, teacher) for _ in range(7)]
    alone = Distillation(teacher=f"{teacher}@1", rewards=False)
    waiting = client.train([[run.id]], student, TrainConfig(distillation=alone))
    assert not client.job(before[-1].id).ended, "or the test tells nothing"
    assert client.wait(waiting).metrics["calls_trained"] == 1
