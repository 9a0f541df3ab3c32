"""Whatever the graph: no token is lost, doubled or invented.

``make soak`` draws thirty times as many graphs, new ones each time; with
``ART_TEST_SEED`` the same again.
"""

import asyncio
from collections import Counter
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from langchain_art import capture
from langchain_art.client.sync_client import ArtClient
from langchain_art.wire import Trajectory, TrajectoryGroup
from langchain_art_server.algorithms.sequences.training_rows import SampledCall
from tests.conformance.suite.harness import MODES, Kit, Mode
from tests.conformance.topologies.journal import laid_out, served_by
from tests.conformance.topologies.random_graphs import Group, Played, programs
from tests.support.live_server import RuleServer
from tests.support.seeds import drawn_seed
from tests.support.soak import count

DRAWN = count(10, 300)

CALL = ("id", "prompt_token_ids", "token_ids", "logprobs")
Lines = list[dict[str, Any]]
"""Of the engine's journal."""


def play(played: Played) -> Trajectory:
    """Runs a program to its end, answering whatever it asks."""
    agent, kit = played.compiled(InMemorySaver()), played.kit

    def go(input: Any) -> None:
        step = kit.run(agent, input)
        asyncio.run(_awaited(step())) if kit.asynchronous else step()

    with capture() as run:
        go({"messages": []})
        while asked := agent.get_state(kit.config).interrupts:
            assert run.status == "interrupted"
            go(Command(resume={one.id: "yes" for one in asked}))
    assert run.status == "completed", run.error
    return run.trajectory()


async def _awaited(result: Any) -> None:
    await result


def told(trajectory: Trajectory, played: Played, lines: Lines) -> None:
    """The turns are the engine's calls, each once, as the program made them."""
    turns = trajectory.turns
    journal = {line["id"]: line for line in lines}
    assert Counter(turn.call_id for turn in turns) == Counter(line["id"] for line in lines)
    assert journal.keys() == played.fates.keys()
    for index, turn in enumerate(turns):
        fate, line = played.fates[turn.call_id or ""], journal[turn.call_id or ""]
        assert ("/".join(turn.path), turn.excluded_because is not None) == (
            fate.path,
            fate.excluded,
        )
        assert trajectory.prompt(index) == line["messages"]
        assert turn.usage is not None
        assert turn.usage.prompt_tokens == len(line["prompt_token_ids"])
        assert turn.usage.completion_tokens == len(line["token_ids"])
    assert "sampled_elsewhere" not in trajectory.metadata


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(count(300, 3600))
def test_random_graphs(rule_server: RuleServer) -> None:
    runs: list[Trajectory] = []
    tokens: list[int] = []

    @seed(drawn_seed())
    @settings(
        max_examples=DRAWN,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs(), mode=st.sampled_from(MODES))
    def holds(program: Group, mode: Mode) -> None:
        note(f"{program} in mode {mode}")
        before = len(rule_server.witnessed())
        played = Played(Kit(served_by(rule_server), mode, threaded=True), program)
        trajectory = play(played)
        lines = rule_server.witnessed()[before:]
        told(trajectory, played, lines)
        journal = {line["id"]: SampledCall(*map(line.get, CALL)) for line in lines}
        kept = [turn.call_id or "" for turn in trajectory.turns if turn.excluded_because is None]
        rows = laid_out([journal[id] for id in kept])
        tokens.append(sum(sum(map(bool, row.mask)) for row in rows))
        runs.append(trajectory.model_copy(update={"reward": float(len(runs))}))

    holds()

    group = TrajectoryGroup(id=uuid4().hex, trajectories=tuple(runs))
    with ArtClient(rule_server.base_url) as client:
        result = client.wait(client.train([group], rule_server.policy, key=uuid4().hex))
    assert result.metrics["tokens_trained"] == sum(tokens)
