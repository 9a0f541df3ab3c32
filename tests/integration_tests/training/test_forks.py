"""Fits on branched runs of a real graph: each sampled token is trained once, with its credit."""

from __future__ import annotations

import io
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from rich.console import Console

from langchain_art import ArtClient, ChatART, FitResult, Forks, Trainer
from langchain_art.errors import ConfigError
from langchain_art.rollout.forks import FORK
from langchain_art.training.batch.fork_advantages import fork_advantages, fork_of
from langchain_art.wire import LoraConfig, Trajectory, TrajectoryGroup
from tests.support.live_server import LiveServer

QUESTIONS = [{"id": f"q-{i}", "input": f"Say {i}"} for i in range(4)]
FORKS = Forks(at=("choose",), continuations=2, run_again=("act",))


class Fit:
    """A graph of three nodes, a trainer that branches its middle one, and the groups it judged."""

    def __init__(
        self, server: LiveServer, folder: Path, *, asynchronous: bool = True, **options: Any
    ) -> None:
        self.judged, self.told = list[TrajectoryGroup](), io.StringIO()
        self.policy = f"forks-{uuid.uuid4().hex[:8]}"
        self.model = ChatART(model=self.policy, base_url=server.base_url, max_tokens=4)
        built = StateGraph(MessagesState)
        last = START
        for name in ("plan", "choose", "act"):
            built.add_node(name, self.node(asynchronous))
            built.add_edge(last, name)
            last = name
        self.graph = built.compile(checkpointer=InMemorySaver())
        given: dict[str, Any] = {"group_size": 2, "groups_per_step": 2, "forks": FORKS}
        given |= {"lora": LoraConfig(rank=2, alpha=4.0), "out_dir": folder}
        console = Console(file=self.told, width=200)
        self.trainer = Trainer(
            self.model, evaluator=self.judge, console=console, **(given | options)
        )

    def node(self, asynchronous: bool) -> Any:
        async def coroutine(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await self.model.ainvoke(state["messages"])]}

        def plain(state: MessagesState) -> dict[str, Any]:
            return {"messages": [self.model.invoke(state["messages"])]}

        return coroutine if asynchronous else plain

    def judge(self, group: TrajectoryGroup) -> list[float]:
        """Rewards that differ; of what the whole run said, which a continuation's output has."""
        assert all(len(run.output["messages"]) == 4 for run in group.trajectories)
        self.judged.append(group)
        return [float(i % 3) for i, _ in enumerate(group.trajectories)]

    async def fit(self, steps: int = 1) -> FitResult:
        return await self.trainer.fit(self.graph, QUESTIONS, steps=steps)


def scored(group: TrajectoryGroup) -> TrajectoryGroup:
    runs = tuple(
        run.model_copy(update={"reward": float(i % 3)}) for i, run in enumerate(group.trajectories)
    )
    return group.model_copy(update={"trajectories": runs})


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_every_token_is_trained_once_with_its_advantage(
    art_server: LiveServer, tmp_path: Path, asynchronous: bool
) -> None:
    own = Fit(art_server, tmp_path, asynchronous=asynchronous)
    found = await own.fit(2)
    assert found.version == 2 and not found.excluded
    assert "given by Trainer(advantages=…)" not in own.told.getvalue()
    assert "branched" not in own.told.getvalue()
    assert [len(group.trajectories) for group in own.judged] == [6] * 4
    with ArtClient(art_server.base_url) as client, art_server.http() as http:
        job = client.jobs(own.policy)[0]  # of the first step
        sampled = trained = 0
        for group in own.judged[:2]:
            expected = fork_advantages(scored(group))
            for run, advantages in zip(group.trajectories, expected, strict=True):
                kept = client.trajectory(run.id)
                assert kept.metadata.get(FORK) == run.metadata.get(FORK)
                audit = client.audit(run.id)
                sampled += audit.sampled_tokens
                trained += audit.trained_tokens
                assert audit.trained_by == {own.policy: job.id}
                shown = http.get(f"/page/runs/{run.id}/credit/{job.id}").json()
                assert [one["advantage"] for one in shown["turns"]] == pytest.approx(advantages)
                prefix_is_what_was_sampled(client, run, group)
        assert sampled == trained > 0
        assert found.history[0].tokens["completion"] == sampled
        calls = [
            turn.call_id for group in own.judged for t in group.trajectories for turn in t.turns
        ]
        assert len(set(calls)) == len(calls) == 4 * 2 * (3 + 2 * 2)


def prefix_is_what_was_sampled(client: ArtClient, run: Trajectory, group: TrajectoryGroup) -> None:
    """A continuation's prompt has the very tokens that the run before the branch sampled."""
    about = fork_of(run)
    if about is None:
        return
    trunk = next(one for one in group.trajectories if one.id == about.of)
    assert (about.turns, len(run.turns), run.metadata["sampled_elsewhere"]) == (
        1,
        2,
        [trunk.turns[0].call_id],
    )
    before, after = (client.call(str(turn.call_id)) for turn in (trunk.turns[0], run.turns[0]))
    known = [*before["prompt_token_ids"], *before["token_ids"]]
    assert after["prompt_token_ids"][: len(known)] == known


async def test_a_fit_that_was_interrupted_goes_on_with_the_same_branches(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Fit(art_server, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("langchain_art.client.async_client.AsyncArtClient.train", _broken)
        with pytest.raises(RuntimeError, match="the client's end"):
            await own.fit()
    found = await own.fit()
    assert len(own.judged) == 2 and found.version == 1 and not found.excluded
    other = Fit(art_server, tmp_path, forks=Forks(at=("choose", "act")))
    other.trainer.policies = own.trainer.policies
    with pytest.raises(ConfigError, match=r"holds another fit(.|\n)*forks"):
        await other.fit(2)


def _broken(*given: Any, **options: Any) -> Any:
    raise RuntimeError("the client's end")


async def test_a_graph_that_cannot_be_branched_is_refused_before_anything_runs(
    art_server: LiveServer, tmp_path: Path
) -> None:
    own = Fit(art_server, tmp_path, forks=Forks(at=("choose",)))
    with pytest.raises(ConfigError, match="'act' a second time, which is not stated to be safe"):
        await own.fit()
    own.trainer = Fit(art_server, tmp_path).trainer
    with pytest.raises(ConfigError, match=r"the rollout <.*expected a compiled StateGraph"):
        await own.trainer.fit(lambda scenario: 1.0, QUESTIONS, steps=1)
    assert not own.judged and not (tmp_path / "history.jsonl").exists()


async def test_one_tree_of_a_scenario_is_enough_and_branches_that_never_come_are_told(
    art_server: LiveServer, tmp_path: Path
) -> None:
    own = Fit(art_server, tmp_path / "one", group_size=1)
    found = await own.fit()
    assert found.version == 1 and [len(group.trajectories) for group in own.judged] == [3, 3]
    built = own.graph.builder
    built.add_node("never", lambda state: {"messages": [AIMessage("no")]})
    own.graph = built.compile(checkpointer=InMemorySaver())
    none = Fit(art_server, tmp_path / "none", forks=Forks(at=("never",)))
    none.graph = own.graph
    none.model = own.model
    await none.fit()
    assert re.search("forks: no run of the first batch was branched.*'never'", none.told.getvalue())
