"""The same seed gives the same fit: every reward and every bit of the adapter."""

import random
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

from langchain_art import ArtClient, ChatART, Run, TrainConfig, capture
from langchain_art.training.records import FitResult
from tests.support import repeatable_fit
from tests.support.chat_models import model_of
from tests.support.forked_start import ForkedProgram
from tests.support.leased_agent import command
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import trainer_of

QUESTIONS = [f"Which of the {number} mails?" for number in range(12)]


def agent(model: ChatART) -> Any:
    """Two branches with the same prompt, two with others, and a node that reads all of them.

    In threads, the branches with the same prompt would draw their seeds in any order.
    """

    async def draft(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"][:1])]}

    async def choose(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def branches(state: MessagesState) -> list[Send]:
        texts = ["Draft.", "Draft.", "Think.", "Write."]
        return [Send("draft", {"messages": [("user", text)]}) for text in texts]

    graph = StateGraph(MessagesState)
    graph.add_node("draft", draft)
    graph.add_node("choose", choose)
    graph.add_conditional_edges(START, branches, ["draft"])
    graph.add_edge("draft", "choose")
    return graph.compile()


def fit(server: LiveServer, out: Path, seed: int) -> tuple[FitResult, list[str], str]:
    """A fit of a new policy: its result, all replies in order, and the digest of its adapter."""
    policy = new_id("again")
    graph, said = agent(model_of(server, policy, max_tokens=6)), list[str]()

    async def rollout(question: str) -> Run:
        async with capture(scenario=question) as run:
            state = await graph.ainvoke({"messages": [("user", question)]})
            text = " ".join(sorted(message.text for message in state["messages"]))
            said.append(f"{question} {text}")
            run.reward = len(text) / 50 + run.rng.random()
        return run

    config = TrainConfig(learning_rate=1e-2, optimizer_steps=2)
    trainer = trainer_of(server, out, policy, seed=seed, group_size=2, config=config)
    result = trainer.fit_sync(rollout, QUESTIONS, steps=2, eval_scenarios=QUESTIONS[:3])
    [adapter] = server.data_dir.glob(f"adapters/{policy}/2/adapter_model.safetensors")
    return result, sorted(said), sha256(adapter.read_bytes()).hexdigest()


@contextmanager
def other_work(server: LiveServer) -> Generator[None]:
    """Calls of another caller, which share the engine's batches, of random lengths."""
    stop, rng = threading.Event(), random.Random(0)

    def ask() -> None:
        model = model_of(server)
        while not stop.is_set():
            model.invoke("mail " * rng.randint(1, 60), max_tokens=rng.randint(1, 30))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_the_same_seed_gives_the_same_fit(art_server: LiveServer, tmp_path: Path) -> None:
    first, said, adapter = fit(art_server, tmp_path / "first", 0)
    with other_work(art_server):
        again, said_again, adapter_again = fit(art_server, tmp_path / "again", 0)
    assert said_again == said
    assert [one.reward_mean for one in again.history] == [one.reward_mean for one in first.history]
    assert [one.mean for one in again.evals] == [one.mean for one in first.evals]
    assert adapter_again == adapter
    _, others, other_adapter = fit(art_server, tmp_path / "other", 1)
    assert others != said and other_adapter != adapter


def test_workers_sample_what_the_fit_would(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that share the rollouts give the same bits as the fit's own process."""
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    found: list[Any] = []
    for workers in (0, 2):
        policy = new_id("again")
        log, name = tmp_path / "log", repeatable_fit.NAME
        running = [command(art_server.base_url, log, name) for _ in range(workers)]
        try:
            wait_for_workers(art_server, running)  # before the first rollout is put up
            where = "server" if workers else None
            out = tmp_path / str(workers)
            result = repeatable_fit.fit(art_server.base_url, policy, out, workers=where)
        finally:
            for one in running:
                one.terminate()
            for one in running:
                one.wait(60)
        rewards = [one.reward_mean for one in result.history]
        means = [one.mean for one in result.evals]
        found.append((rewards, means, repeatable_fit.digests(art_server.data_dir, policy)))
    assert found[0] == found[1]


def wait_for_workers(server: LiveServer, running: list[ForkedProgram]) -> None:
    """Until the server knows them."""
    wanted, deadline = {str(one.pid) for one in running}, time.monotonic() + 120
    with ArtClient(server.base_url) as client:
        while not wanted <= {one.name.split(":")[1] for one in client.status().workers}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
