"""What a scope is: threads over several scopes and processes, calls that none hears, many at once.

A scope is one trajectory. Where a thread is resumed in another scope, that is another trajectory:
what was said before is context to it, and each token stays with the run that sampled it.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import MessagesState
from langgraph.types import Command

from langchain_art import CaptureHandler, Trajectory, capture
from langchain_art.client.sync_client import ArtClient
from langchain_art.wire import TrajectoryGroup
from tests.conformance.suite import checks
from tests.conformance.suite.cases.interrupts import careful
from tests.conformance.suite.harness import Expect, Kit, Topology
from tests.conformance.suite.nodes import Rendezvous, line
from tests.conformance.suite.performance import Performance
from tests.conformance.topologies.journal import each_token_once, served_by, witnessed
from tests.conformance.topologies.other_process import durable
from tests.support.live_server import REPO, RuleServer
from tests.support.soak import count

Seen: TypeAlias = "Callable[..., Performance]"


@pytest.fixture
def kit(rule_server: RuleServer) -> Kit:
    return Kit(served_by(rule_server), "invoke", 1, threaded=True)


@pytest.fixture
def seen(rule_server: RuleServer, client: ArtClient, kit: Kit) -> Seen:
    """Compares a trajectory with the engine's calls that were tagged with its id."""
    before = len(rule_server.witnessed())
    owners: dict[str, str | None] = {}

    def look(trajectory: Trajectory, *expects: Expect, **options: Any) -> Performance:
        case = Topology("", lambda kit: iter(()), expects, **{"threaded": True, **options})
        journal = witnessed(rule_server.witnessed()[before:])
        for id in journal.keys() - owners.keys():
            owners[id] = client.call(id)["tags"].get("trajectory_id")
        own = {id: one for id, one in journal.items() if owners[id] == trajectory.id}
        performance = Performance(case, trajectory, own, kit.thread, client)
        checks.captured(performance)
        checks.exact_tokens(performance)
        each_token_once(performance)
        checks.judged(performance)
        return performance

    return look


def trains(client: ArtClient, kit: Kit, *runs: Performance) -> None:
    """All tokens of all runs learn, each once, though one run's tokens are another's context."""
    scored = [
        one.trajectory.model_copy(update={"reward": float(number)})
        for number, one in enumerate(runs)
    ]
    group = TrajectoryGroup(id=uuid4().hex, trajectories=tuple(scored))
    result = client.wait(client.train([group], kit.served.policy, key=uuid4().hex))
    assert result.excluded == {}
    sampled = sum(call.sampled or 0 for one in runs for call in one.witnessed.values())
    assert result.metrics["tokens_trained"] == sampled


def test_a_thread_resumed_in_another_scope(kit: Kit, client: ArtClient, seen: Seen) -> None:
    graph = line(MessagesState, early=kit.node(), careful=careful(kit, "sure?"), late=kit.node())
    agent = graph.compile(checkpointer=InMemorySaver())
    with capture() as first:
        agent.invoke(kit.ask("e"), kit.config)
    with capture() as second:
        agent.invoke(Command(resume="yes"), kit.config)
    one = seen(
        first.trajectory(),
        Expect("early", "e", step=1),
        Expect("careful", "sure? 1", step=2),
        status="interrupted",
    )
    other = seen(
        second.trajectory(),
        Expect("careful", "sure? 2", step=2),
        Expect("late", "done", step=3),
    )
    assert other.trajectory.metadata["sampled_elsewhere"] == [first.turns[0].call_id]
    trains(client, kit, one, other)


def test_a_thread_resumed_in_another_process(
    kit: Kit, client: ArtClient, seen: Seen, tmp_path: Path
) -> None:
    threads = str(tmp_path / "threads.sqlite")
    with capture() as first, SqliteSaver.from_conn_string(threads) as saver:
        durable(kit, saver).invoke(kit.ask("e"), kit.config)
    argv = [sys.executable, "-m", durable.__module__, threads, kit.thread]
    argv += [kit.served.policy, kit.served.base_url]
    process = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    asked = Expect("careful", "sure? 1", step=2)
    one = seen(first.trajectory(), Expect("early", "e", step=1), asked, status="interrupted")
    second = Trajectory.model_validate_json(process.stdout)
    other = seen(second, asked, Expect("late", "done", step=3))
    assert second.metadata["sampled_elsewhere"] == [first.turns[0].call_id]
    trains(client, kit, one, other)


def test_a_run_told_on_by_another_handler(kit: Kit, seen: Seen) -> None:
    agent = line(MessagesState, careful=careful(kit, "sure?")).compile(InMemorySaver())
    with capture() as run:
        agent.invoke(kit.ask("unused"), kit.config)
    assert run.status == "interrupted"
    agent.invoke(Command(resume="yes"), {**kit.config, "callbacks": [CaptureHandler(run)]})
    seen(
        run.trajectory(),
        Expect("careful", "sure? 1", step=1, task="careful", why="superseded_interrupted"),
        Expect("careful", "sure? 2", step=1, task="careful"),
    )


def test_a_fork_in_another_scope(kit: Kit, client: ArtClient, seen: Seen) -> None:
    agent = line(MessagesState, plan=kit.node(), act=kit.node()).compile(InMemorySaver())
    with capture() as first:
        agent.invoke(kit.ask("p", "a"), kit.config)
    history = agent.get_state_history(kit.config)
    before = next(state for state in history if state.next == ("act",)).config
    said = {"messages": [HumanMessage(kit.says("other"))]}
    with capture() as second:
        agent.invoke(None, agent.update_state(before, said))
    one = seen(first.trajectory(), Expect("plan", "p", step=1), Expect("act", "a", step=2))
    other = seen(second.trajectory(), Expect("act", "other", step=3))
    assert other.trajectory.metadata["sampled_elsewhere"] == [first.turns[0].call_id]
    trains(client, kit, one, other)


def test_raw_threads_that_no_scope_hears(kit: Kit, seen: Seen) -> None:
    def node(state: Any) -> Any:
        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(kit.model.invoke, [kit.says(word) for word in "ab"]))
        asked = [*state["messages"], *replies, HumanMessage(kit.says("end"))]
        return {"messages": [*replies, kit.model.invoke(asked)]}

    with capture() as run:
        state = line(MessagesState, many=node).compile().invoke(kit.ask("unused"))
    one = seen(run.trajectory(), Expect("many", "end", step=1), threaded=False)
    lost = [message.response_metadata["call_id"] for message in state["messages"][1:3]]
    assert one.trajectory.metadata["sampled_elsewhere"] == lost


def test_a_reply_from_elsewhere_that_only_the_output_holds(kit: Kit) -> None:
    reply = kit.model.invoke(kit.says("before"))
    with capture() as run:
        line(MessagesState, same=lambda state: {"messages": [reply]}).compile().invoke(kit.ask())
    elsewhere = run.trajectory().metadata["sampled_elsewhere"]
    assert elsewhere == [reply.response_metadata["call_id"]]


def test_nested_scopes(kit: Kit, client: ArtClient) -> None:
    agent = line(MessagesState, answer=kit.node()).compile()
    with capture() as outer:
        agent.invoke(kit.ask("one"))
        with capture() as inner:
            agent.invoke(kit.ask("two"))
        agent.invoke(kit.ask("three"))
    assert [checks.says(turn) for turn in outer.turns] == ["one", "two", "three"]
    assert [checks.says(turn) for turn in inner.turns] == ["two"]
    tagged = [client.call(turn.call_id or "")["tags"]["trajectory_id"] for turn in outer.turns]
    assert tagged == [outer.id, inner.id, outer.id]


@pytest.mark.parametrize("words", [("bad", "good"), ("good", "bad")])
def test_a_failure_beside_others_in_a_batch(kit: Kit, words: tuple[str, str]) -> None:
    begun = Rendezvous(2)

    def answer(state: Any) -> Any:
        begun.threads.wait()
        if "bad" in state["messages"][-1].text:
            raise ValueError("bad")
        return {"messages": [kit.model.invoke(state["messages"])]}

    states: Any = [kit.ask(word) for word in words]
    with capture() as run:
        line(MessagesState, answer=answer).compile().batch(states, return_exceptions=True)
    assert (run.status, run.error) == ("failed", "ValueError: bad")
    assert [(checks.says(turn), turn.excluded_because) for turn in run.turns] == [("good", None)]


def test_concurrent_runs_stay_apart(rule_server: RuleServer, seen: Seen) -> None:
    kit = Kit(served_by(rule_server), "ainvoke")
    agent = line(MessagesState, plan=kit.node(), act=kit.node()).compile()

    async def rollout(number: int) -> Trajectory:
        async with capture() as run:
            await agent.ainvoke(kit.ask(f"p {number}", f"a {number}"))
        return run.trajectory()

    async def rollouts() -> list[Trajectory]:
        return await asyncio.gather(*map(rollout, range(count(12, 40))))

    for number, trajectory in enumerate(asyncio.run(rollouts())):
        expects = [Expect("plan", f"p {number}", step=1), Expect("act", f"a {number}", step=2)]
        seen(trajectory, *expects, threaded=False)
