"""A graph that runs on another machine: LangGraph's `RemoteGraph` is trained as it is."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from langgraph.graph import MessagesState
from langgraph.pregel.remote import RemoteGraph

from langchain_art import ArtClient, Trainer, TrajectoryGroup
from langchain_art.errors import ArtError, ConfigError
from langchain_art.tracing.message_log import jsonable
from langchain_art.wire import TrainConfig
from tests.support import trainers
from tests.support.chat_models import model_of
from tests.support.graphs import Scripted, graph_of, node
from tests.support.json_server import JsonServer
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id


class GraphServer(JsonServer):
    """What `RemoteGraph` uses of LangGraph's server: stateless runs, streamed as events.

    It runs a graph in threads of its own, where no callback and no context of a caller reaches.
    """

    def __init__(self, **nodes: Any) -> None:
        super().__init__()
        self._graph = graph_of(**nodes).compile()

    @property
    def graph(self) -> RemoteGraph:
        return RemoteGraph("agent", url=self.url)

    def answer(self, path: str, body: Any) -> str:
        assert path == "/runs/stream"
        states = self._graph.stream(body["input"], body.get("config"), stream_mode="values")
        events = [f"event: values\ndata: {json.dumps(jsonable(state))}\n\n" for state in states]
        return "".join(events)


@pytest.fixture
def policy() -> str:
    return new_id("remote")


@pytest.fixture
def remote(art_server: LiveServer, policy: str) -> Iterator[RemoteGraph]:
    with GraphServer(writer=node(model_of(art_server, policy))) as server:
        yield server.graph


@pytest.fixture
def client(art_server: LiveServer) -> Iterator[ArtClient]:
    with ArtClient(art_server.base_url, art_server.api_key) as made:
        yield made


def ranks(group: TrajectoryGroup) -> Sequence[float]:
    assert all(run.turns[0].node == "writer" for run in group.trajectories), "the story is told"
    assert all(len(run.output["messages"]) == 2 for run in group.trajectories)
    return [i / 10 for i, _ in enumerate(group.trajectories)]


def trainer_of(server: LiveServer, policy: str, out: Path, **options: Any) -> Trainer:
    chosen = {"evaluator": ranks, "config": TrainConfig(advantage="mean")}
    return trainers.trainer_of(server, out, policy, **(chosen | options))


async def test_a_remote_graph_is_trained_as_it_is(
    art_server: LiveServer, client: ArtClient, policy: str, remote: RemoteGraph, tmp_path: Path
) -> None:
    trainer = trainer_of(art_server, policy, tmp_path, trainable={"writer": True})
    found = await trainer.fit(remote, ["Say one", "Say two"], steps=2)
    assert found.version == 2
    for step in found.history:
        assert step.nodes["writer"].calls == 8
        assert step.nodes["writer"].tokens == step.tokens["completion"] > 0
    runs = [t for t in client.trajectories(16) if client.audit(t.id).trained_by]
    assert {run.reward for run in runs} == {0.0, 0.1, 0.2, 0.3}
    assert len(runs) == 16
    # Each token of a run has the run's advantage, and a reply may be shorter than the others.
    for at, step in enumerate(found.history):
        own = [run for run in runs if run.turns[0].model == f"{policy}@{at}"]
        sizes = [abs((run.reward or 0.0) - 0.15) for run in own]
        sampled = [run.turns[0].usage.completion_tokens for run in own if run.turns[0].usage]
        mean = sum(a * n for a, n in zip(sizes, sampled, strict=True)) / sum(sampled)
        assert step.nodes["writer"].advantage_abs == pytest.approx(mean)


async def test_a_remote_graph_of_other_models_is_said(
    art_server: LiveServer, policy: str, tmp_path: Path
) -> None:
    trainer = trainer_of(art_server, policy, tmp_path)
    wanted = pytest.raises(ConfigError, match="bears its run's id")
    with GraphServer(writer=node(Scripted(lines=["hi"]))) as server, wanted:
        await trainer.fit(server.graph, ["Say one"], steps=1)


async def test_an_evaluation_of_a_remote_graph_has_its_turns_and_its_version(
    art_server: LiveServer, client: ArtClient, policy: str, remote: RemoteGraph, tmp_path: Path
) -> None:
    client.create_policy(policy, trainers.SMALL)
    found = await trainer_of(art_server, policy, tmp_path).evaluate(remote, ["Say one"])
    assert found.mean == 0.0 and found.tokens["completion"] > 0
    other = trainer_of(art_server, "other-policy", tmp_path)
    with pytest.raises(ArtError, match="called"):
        await other.evaluate(remote, ["Say one"])


async def test_a_remote_run_that_failed_before_its_first_call_may_have_a_number(
    art_server: LiveServer, policy: str, tmp_path: Path
) -> None:
    writes, raises = node(model_of(art_server, policy)), iter([True])

    def write(state: MessagesState) -> dict[str, Any]:
        if next(raises, False):
            raise ValueError("the tool is away")
        return writes(state)

    def numbers(group: TrajectoryGroup) -> list[float]:
        return [-1.0 if run.status == "failed" else 0.5 for run in group.trajectories]

    own: dict[str, Any] = {"evaluator": None, "config": None, "advantages": numbers}
    trainer = trainer_of(art_server, policy, tmp_path, groups_per_step=1, **own)
    with GraphServer(writer=write) as server:
        found = await trainer.fit(server.graph, ["Say one"], steps=1)
    assert (found.version, found.history[0].failed) == (1, 1)
