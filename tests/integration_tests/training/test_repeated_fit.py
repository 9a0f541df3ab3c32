"""The same seed gives the same fit, and `langchain-art fits diff` names what two do differently."""

import random
import re
import shutil
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
from typer.testing import CliRunner

from langchain_art import ArtClient, ChatART, Run, TrainConfig, capture
from langchain_art.cli import main
from langchain_art.errors import ConfigError
from langchain_art.rollout.scenarios import draw
from langchain_art.training.records import FitResult
from tests.support import repeatable_fit
from tests.support.chat_models import model_of
from tests.support.forked_start import ForkedProgram
from tests.support.leased_agent import command
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import trainer_of

QUESTIONS = [f"Which of the {number} mails?" for number in range(12)]
#: The second of the two scenarios of the second step, with the seed 0.
LATER = draw(QUESTIONS, 3, 0)


def agent(model: ChatART, temperature: list[float]) -> Any:
    """Two branches with the same prompt, two with others, and a node that reads all of them.

    In threads, the branches with the same prompt would draw their seeds in any order.
    """

    async def draft(state: MessagesState) -> Any:
        asked = state["messages"][:1]
        return {"messages": [await model.ainvoke(asked, temperature=temperature[-1])]}

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


def fit(
    server: LiveServer,
    out: Path,
    *,
    seed: int = 0,
    hot: bool = False,
    bonus: float = 0.0,
    rate: float = 1e-2,
) -> tuple[FitResult, str]:
    """A fit of a new policy, whose second step may differ; the digest of its adapter."""
    policy, temperature = new_id(out.name), [1.0]
    graph = agent(model_of(server, policy, max_tokens=6), temperature)

    async def rollout(question: str) -> Run:
        async with capture(scenario=question) as run:
            state = await graph.ainvoke({"messages": [("user", question)]})
            text = " ".join(sorted(message.text for message in state["messages"]))
            run.reward = len(text) / 50 + run.rng.random()
            run.reward += bonus if len(temperature) > 1 and question == LATER else 0.0
        return run

    config = TrainConfig(learning_rate=rate, optimizer_steps=2)
    trainer = trainer_of(server, out, policy, seed=seed, group_size=2, config=config)
    result = trainer.fit_sync(
        rollout,
        QUESTIONS,
        steps=2,
        eval_scenarios=QUESTIONS[:3],
        on_step=lambda _: temperature.append(2.0 if hot else 1.0),
    )
    [adapter] = server.data_dir.glob(f"adapters/{policy}/2/adapter_model.safetensors")
    return result, sha256(adapter.read_bytes()).hexdigest()


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


Base = tuple[Path, FitResult, str]


@pytest.fixture(scope="module")
def base(art_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """The fit that the others are compared with, below the folder of all."""
    root = tmp_path_factory.mktemp("fits")
    return root, *fit(art_server, root / "base")


def differ(server: LiveServer, root: Path, one: str, other: str) -> tuple[int, str]:
    asked = ["fits", "diff", one, other, "--root", str(root), "--base-url", server.base_url]
    done = CliRunner().invoke(main.app, asked)
    if isinstance(done.exception, ConfigError):
        raise done.exception
    return done.exit_code, done.output.strip()


def test_the_same_seed_gives_the_same_fit(art_server: LiveServer, base: Base) -> None:
    root, first, adapter = base
    with other_work(art_server):
        again, same = fit(art_server, root / "again")
    code, said = differ(art_server, root, "again", "base")
    tokens = re.search(r"equal: 40 calls, (\d+) tokens, ", said)
    assert code == 0 and said.endswith(f"adapters {again.adapter} sha256 {adapter}")
    assert tokens is not None and 40 <= int(tokens[1]) <= 40 * 6
    assert [one.mean for one in again.evals] == [one.mean for one in first.evals]
    assert same == adapter
    other, other_adapter = fit(art_server, root / "other", seed=1)
    assert other.history[0].reward_mean != first.history[0].reward_mean
    assert other_adapter != adapter
    with pytest.raises(ConfigError, match="the seeds 0 and 1, expected one seed"):
        differ(art_server, root, "base", "other")


def test_another_temperature_shows_at_the_first_token_or_logprob(
    art_server: LiveServer, base: Base
) -> None:
    fit(art_server, base[0] / "hot", hot=True)
    code, said = differ(art_server, base[0], "base", "hot")
    wanted = (
        rf"step 2, scenario '({re.escape(draw(QUESTIONS, 2, 0))}|{re.escape(LATER)})', "
        r"member 0, node draft, call 0, (token|logprob) \d: "
        r"\S+ and \S+; its temperature is 1.0 and 2.0 \(equal before: 20 calls, "
    )
    assert code == 1 and re.search(wanted, said), said


def test_another_reward_shows_though_all_tokens_are_equal(
    art_server: LiveServer, base: Base
) -> None:
    fit(art_server, base[0] / "bonus", bonus=0.5)
    code, said = differ(art_server, base[0], "base", "bonus")
    where = re.escape(f"step 2, scenario '{LATER}', member 0, reward: ")
    found = re.search(where + r"(\S+) and (\S+) \(", said)
    assert code == 1 and found is not None, said
    assert float(found[2]) - float(found[1]) == pytest.approx(0.5)


def test_another_learning_rate_shows_in_the_first_steps_training_and_in_a_weight(
    art_server: LiveServer, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(art_server, base[0] / "slow", rate=5e-3)
    code, said = differ(art_server, base[0], "base", "slow")
    assert "; config.learning_rate 0.01 -> 0.005\n" in said
    wanted = r"\nstep 1, base-\w+, loss: \S+ and \S+ \(equal before: 20 calls, "
    assert code == 1 and re.search(wanted, said), said
    # With no metric before it: those of the machine alone are left out otherwise.
    monkeypatch.setattr("langchain_art.training.fits._OF_THE_MACHINE", ("",))
    code, said = differ(art_server, base[0], "base", "slow")
    found = re.search(r"step 1, base-\w+, weight \S+lora_\S+\[\d+\]: (\S+) and (\S+) \(", said)
    assert code == 1 and found is not None and float(found[1]) != float(found[2]), said


def test_a_fit_that_goes_on_differs_where_the_other_has_ended(
    art_server: LiveServer, base: Base
) -> None:
    root = base[0]
    shutil.copytree(root / "base", root / "short")
    lines = (root / "base" / "history.jsonl").read_text().splitlines(keepends=True)
    (root / "short" / "history.jsonl").write_text("".join(lines[:2]))
    code, said = differ(art_server, root, "base", "short")
    assert code == 1 and "short has ended after step 1, the other has not (equal" in said


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
