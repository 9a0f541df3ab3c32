"""A graph that runs on another machine: LangGraph's `RemoteGraph` is trained as it is."""

import io
import json
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel.remote import RemoteGraph
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from langchain_art import ArtClient, ChatART, Trainer, TrajectoryGroup
from langchain_art.errors import ArtError, ConfigError
from langchain_art.tracing.message_log import jsonable
from langchain_art.wire import LoraConfig, TrainConfig
from tests.support.live_server import LiveServer


class GraphServer:
    """What `RemoteGraph` uses of LangGraph's server: stateless runs, streamed as events.

    It runs graphs in a thread of its own, where no callback and no context of a caller reaches.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        app = Starlette(routes=[Route("/runs/stream", self._run, methods=["POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._thread.start()

    async def _run(self, request: Request) -> StreamingResponse:
        body = json.loads(await request.body())

        async def events() -> AsyncIterator[str]:
            async for state in self._graph.astream(
                body["input"], body.get("config"), stream_mode="values"
            ):
                yield f"event: values\ndata: {json.dumps(jsonable(state))}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def graph_of(model: Any) -> Any:
    async def write(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    built = StateGraph(MessagesState)
    built.add_node("writer", write)
    built.add_edge(START, "writer")
    return built.compile()


@pytest.fixture
def policy() -> str:
    return f"remote-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def remote(art_server: LiveServer, policy: str) -> Iterator[RemoteGraph]:
    model = ChatART(model=policy, base_url=art_server.base_url, max_tokens=8)
    server = GraphServer(graph_of(model))
    yield RemoteGraph("agent", url=server.url)
    server.stop()


def ranks(group: TrajectoryGroup) -> Sequence[float]:
    assert all(run.turns[0].node == "writer" for run in group.trajectories), "the story is told"
    assert all(len(run.output["messages"]) == 2 for run in group.trajectories)
    return [i / 10 for i, _ in enumerate(group.trajectories)]


def trainer_of(server: LiveServer, policy: str, out: Path, **options: Any) -> Trainer:
    chosen: dict[str, Any] = {
        "evaluator": ranks,
        "config": TrainConfig(advantage="mean"),
        "group_size": 4,
        "groups_per_step": 2,
        "lora": LoraConfig(rank=2, alpha=4.0),
        "out_dir": out,
        "console": Console(file=io.StringIO()),
    }
    with ArtClient(server.base_url, server.api_key) as client:
        return Trainer(policy, client=client, **(chosen | options))


async def test_a_remote_graph_is_trained_as_it_is(
    art_server: LiveServer, policy: str, remote: RemoteGraph, tmp_path: Path
) -> None:
    trainer = trainer_of(art_server, policy, tmp_path, trainable={"writer": True})
    found = await trainer.fit(remote, ["Say one", "Say two"], steps=2)
    assert found.version == 2
    for step in found.history:
        assert step.nodes["writer"].calls == 8
        assert step.nodes["writer"].tokens == step.tokens["completion"] > 0
    with ArtClient(art_server.base_url, art_server.api_key) as client:
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
    from langchain_core.language_models.fake_chat_models import FakeListChatModel

    server = GraphServer(graph_of(FakeListChatModel(responses=["hi"])))
    try:
        trainer = trainer_of(art_server, policy, tmp_path)
        with pytest.raises(ConfigError, match="bears its run's id"):
            await trainer.fit(RemoteGraph("agent", url=server.url), ["Say one"], steps=1)
    finally:
        server.stop()


async def test_an_evaluation_of_a_remote_graph_has_its_turns_and_its_version(
    art_server: LiveServer, policy: str, remote: RemoteGraph, tmp_path: Path
) -> None:
    trainer = trainer_of(art_server, policy, tmp_path)
    with ArtClient(art_server.base_url, art_server.api_key) as client:
        client.create_policy(policy, LoraConfig(rank=2, alpha=4.0))
    found = await trainer.evaluate(remote, ["Say one"])
    assert found.mean == 0.0 and found.tokens["completion"] > 0
    other = trainer_of(art_server, "other-policy", tmp_path)
    with pytest.raises(ArtError, match="called"):
        await other.evaluate(remote, ["Say one"])


async def test_a_remote_run_that_failed_before_its_first_call_may_have_a_number(
    art_server: LiveServer, policy: str, tmp_path: Path
) -> None:
    model = ChatART(model=policy, base_url=art_server.base_url, max_tokens=8)
    raises = iter([True])

    async def write(state: MessagesState) -> dict[str, Any]:
        if next(raises, False):
            raise ValueError("the tool is away")
        return {"messages": [await model.ainvoke(state["messages"])]}

    built = StateGraph(MessagesState)
    built.add_node("writer", write)
    built.add_edge(START, "writer")
    server = GraphServer(built.compile())
    try:
        trainer = trainer_of(
            art_server,
            policy,
            tmp_path,
            evaluator=None,
            config=None,
            advantages=lambda group: [
                -1.0 if run.status == "failed" else 0.5 for run in group.trajectories
            ],
            groups_per_step=1,
        )
        found = await trainer.fit(RemoteGraph("agent", url=server.url), ["Say one"], steps=1)
    finally:
        server.stop()
    assert (found.version, found.history[0].failed) == (1, 1)
