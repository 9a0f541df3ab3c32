"""Fits of graphs as they are: which nodes learn, several policies at once, runs that fail."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from typer.testing import CliRunner

from langchain_art import (
    ArtClient,
    AsyncArtClient,
    ChatART,
    Trainer,
    Trajectory,
    TrajectoryGroup,
    capture,
)
from langchain_art.cli.main import app
from langchain_art.errors import ArtError, ConfigError, JobFailed
from langchain_art.rollout.scenarios import draw
from langchain_art.tracing.run import Run
from langchain_art.wire import ClippedRatio, LRSchedule, ServerStatus, TrainConfig
from tests.support import trainers
from tests.support.chat_models import model_of
from tests.support.graphs import graph_of, node
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import said

QUESTIONS = [{"id": f"q-{i}", "input": f"Say {i}"} for i in range(4)]


class Crash(BaseException):
    """What no `except Exception` hears: the client's process dies."""


def name() -> str:
    return new_id("g")


def two_nodes(writer: ChatART, critic: ChatART, **options: Any) -> Any:
    return graph_of(writer=node(writer), critic=node(critic)).compile(**options)


def ranks(group: TrajectoryGroup) -> Sequence[float]:
    """Rewards that always differ: 0, 0.1, 0.2 …"""
    return [i / 10 for i, _ in enumerate(group.trajectories)]


def trainer_of(server: LiveServer, out: Path, *policies: str, **options: Any) -> Trainer:
    """A trainer whose runs of a group are worth 0, 0.1, 0.2 …, whatever they are."""
    chosen: dict[str, Any] = {"evaluator": ranks, "config": TrainConfig(advantage="mean")}
    return trainers.trainer_of(server, out, *policies, **(chosen | options))


def client_of(server: LiveServer) -> ArtClient:
    return ArtClient(server.base_url, server.api_key)


# --- which calls learn ----------------------------------------------------------------------------


async def test_only_the_chosen_node_learns_and_an_evaluator_finds_scenario_and_output(
    art_server: LiveServer, tmp_path: Path
) -> None:
    policy, seen = name(), list[Any]()
    model = model_of(art_server, policy)

    def checked(group: TrajectoryGroup) -> Sequence[float]:
        seen.append(group.metadata["scenario"])
        asked = [run.output["messages"][0]["content"] for run in group.trajectories]
        assert set(asked) == {group.metadata["scenario"]["input"]}
        return ranks(group)

    graph = two_nodes(model, model, checkpointer=InMemorySaver())
    choice = {"writer": True, "critic": False, "editor": False}
    trainer = trainer_of(art_server, tmp_path, policy, trainable=choice, evaluator=checked)
    found = await trainer.fit(graph, QUESTIONS, steps=2, eval_scenarios=QUESTIONS[:2])
    assert (found.adapter, [step.version for step in found.history]) == (f"{policy}@2", [1, 2])
    assert len(seen) == 2 * 2 + 2 * 2 and all(scenario in QUESTIONS for scenario in seen)
    for step in found.history:
        assert step.nodes["writer"].tokens == step.tokens["completion"] / 2 > 0
        assert step.nodes["writer"].advantage_abs == pytest.approx(0.1)
        assert step.nodes["critic"].tokens == 0
        assert step.nodes["critic"].excluded == {"frozen": 8}
    shown = said(trainer)
    assert "'editor' is False and names no model call" in shown
    assert "Trained by node, step 1" in shown and "Trained by node, step 2" not in shown
    assert "Trained by node, all steps" in shown and found.nodes["writer"].calls == 16
    with client_of(art_server) as client:
        trained = [t for t in client.trajectories(8) if client.audit(t.id).trained_by]
        audit = client.audit(trained[0].id, trainable={"critic": False})
        assert [turn.excluded_because for turn in audit.turns] == [None, "frozen"]
        assert audit.trained_tokens == audit.turns[0].sampled_tokens > 0
        assert policy in audit.trained_by


async def test_a_misspelled_node_ends_the_fit_before_anything_is_trained(
    art_server: LiveServer, tmp_path: Path
) -> None:
    policy = name()
    model = model_of(art_server, policy)
    graph = two_nodes(model, model)
    wrong = trainer_of(art_server, tmp_path, policy, trainable={"wirter": True})
    with pytest.raises(ConfigError, match=r"'wirter'.*'writer'"):
        await wrong.fit(graph, QUESTIONS, steps=1)
    with client_of(art_server) as client:
        assert client.jobs(policy) == []
    right = trainer_of(art_server, tmp_path, policy, trainable={"writer": True})
    assert (await right.fit(graph, QUESTIONS, steps=1)).version == 1


async def test_a_resumed_fit_may_go_on_with_a_batch_that_does_not_reach_a_node(
    art_server: LiveServer, tmp_path: Path
) -> None:
    policy, scenarios = name(), ["a", "b"]
    model, first = model_of(art_server, policy), draw(scenarios, 0, 0)

    async def rollout(scenario: str) -> Run:
        async with capture(scenario=scenario) as run:
            tags = ["expert"] if scenario == first else []
            await model.ainvoke(scenario, {"tags": tags})
            run.reward = int(run.id[:8], 16) / 2**32
        return run

    how: dict[str, Any] = {"trainable": {"expert": True}, "seed": 0, "groups_per_step": 1}
    for steps in (1, 2):
        trainer = trainer_of(art_server, tmp_path, policy, **how)
        assert len((await trainer.fit(rollout, scenarios, steps=steps)).history) == steps


async def test_another_choice_in_a_resumed_fit_is_said_and_spares_the_pending_step(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = name()
    model = model_of(art_server, policy)
    graph = two_nodes(model, model)
    with monkeypatch.context() as patch:

        async def crash(*_: Any, **__: Any) -> Any:
            raise Crash

        patch.setattr(AsyncArtClient, "wait", crash)
        first = trainer_of(art_server, tmp_path, policy, trainable={"critic": False})
        with pytest.raises(Crash):
            await first.fit(graph, QUESTIONS, steps=1)
    again = trainer_of(art_server, tmp_path, policy, trainable={"writer": False})
    found = await again.fit(graph, QUESTIONS, steps=2)
    assert "Which calls learn has changed" in said(again)
    trained = [{n: r.tokens > 0 for n, r in step.nodes.items()} for step in found.history]
    assert trained == [{"critic": False, "writer": True}, {"critic": True, "writer": False}]
    with client_of(art_server) as client:
        assert len(client.jobs(policy)) == 2


# --- several policies -----------------------------------------------------------------------------


async def test_two_policies_learn_from_the_same_groups(
    art_server: LiveServer, tmp_path: Path
) -> None:
    writer, critic = name(), name()
    graph = two_nodes(model_of(art_server, writer), model_of(art_server, critic))
    config = {
        writer: TrainConfig(learning_rate=1e-4, schedule=LRSchedule(warmup_steps=2)),
        critic: TrainConfig(learning_rate=3e-4, loss=ClippedRatio(aggregation="run")),
    }
    trainer = trainer_of(art_server, tmp_path, writer, critic, config=config)
    found = await trainer.fit(graph, QUESTIONS, steps=2, eval_scenarios=QUESTIONS[:2], eval_every=1)
    assert found.adapters == (f"{writer}@2", f"{critic}@2")
    rates = [[step.metrics[f"{p}/learning_rate"] for p in config] for step in found.history]
    assert rates == [pytest.approx([0.5e-4, 3e-4]), pytest.approx([1e-4, 3e-4])]
    versions = [(f"{writer}@{n}", f"{critic}@{n}") for n in range(3)]
    assert [e.versions for e in found.evals] == versions
    for step in found.history:
        assert step.nodes[f"{writer}/writer"].tokens > 0
        assert step.nodes[f"{critic}/critic"].tokens > 0
        assert len(step.nodes) == 2
    assert found.best is not None
    with client_of(art_server) as client:
        pinned = [c.name for p in (writer, critic) for c in client.checkpoints(p) if c.pinned]
        runs = [t for t in client.trajectories(24) if len(client.audit(t.id).trained_by) == 2]
    assert set(pinned) == {*found.best.versions, *found.adapters}
    assert len(runs) >= 16, "each run trains both"
    with pytest.raises(ArtError, match="was sampled from"):
        await trainer_of(art_server, tmp_path, f"{writer}@0", critic).evaluate(graph, QUESTIONS[:1])
    old = model_of(art_server, f"{writer}@0")
    pinned = trainer_of(art_server, tmp_path, f"{writer}@0")
    found_old = await pinned.evaluate(two_nodes(old, old), QUESTIONS[:1])
    assert found_old.version == f"{writer}@0"
    with pytest.raises(ArtError, match="instead"):
        await trainer_of(art_server, tmp_path, art_server.policy).evaluate(graph, QUESTIONS[:1])


@pytest.mark.parametrize(
    "where",
    [
        "client.async_client.AsyncArtClient.train",
        "client.async_client.AsyncArtClient.wait",
        "training.fit_state.History.append",
        "training.fit_state.History.end",
    ],
)
async def test_a_crash_anywhere_trains_each_policy_once(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Dies between two orders, after one, before the step is in the history, or after that."""
    writer, critic = name(), name()
    graph = two_nodes(model_of(art_server, writer), model_of(art_server, critic))
    train, orders = AsyncArtClient.train, list[str]()

    async def crash(*given: Any, **more: Any) -> Any:
        if where.endswith("train") and not orders:
            orders.append("one")
            return await train(*given, **more)
        raise Crash

    def dies(*_: Any, **__: Any) -> Any:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(f"langchain_art.{where}", crash if "client" in where else dies)
        with pytest.raises(Crash):
            await trainer_of(art_server, tmp_path, writer, critic).fit(graph, QUESTIONS, steps=1)
    with monkeypatch.context() as patch:  # the batch was written down; nothing is rolled out twice
        patch.setattr("langchain_art.rollout.runner.RolloutWorker.run", None)
        both = trainer_of(art_server, tmp_path, writer, critic)
        found = await both.fit(graph, QUESTIONS, steps=1)
    assert found.versions == {writer: 1, critic: 1}
    with client_of(art_server) as client:
        assert (len(client.jobs(writer)), len(client.jobs(critic))) == (1, 1)


async def test_a_job_that_fails_costs_the_step_for_all_policies(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, critic = name(), name()
    graph = two_nodes(model_of(art_server, writer), model_of(art_server, critic))
    trainer = trainer_of(art_server, tmp_path, writer, critic)
    with monkeypatch.context() as patch:
        wait = AsyncArtClient.wait

        async def fails(self: AsyncArtClient, job: Any, *rest: Any) -> Any:
            done = await wait(self, job, *rest)
            if job.policy == critic:
                raise JobFailed("loss is not finite")
            return done

        patch.setattr(AsyncArtClient, "wait", fails)
        with pytest.raises(JobFailed):
            await trainer.fit(graph, QUESTIONS, steps=1)
    found = await trainer.fit(graph, QUESTIONS, steps=1)
    assert len(found.history) == 1
    with client_of(art_server) as client:
        keys = [job.key for job in client.jobs(writer)]
    key = f"{trainer.out_dir.name.replace('_', '-')}-{found.fit_id}:{writer}:step:1"
    assert keys == [key, f"{key}:2"]


def test_policies_of_several_servers_are_refused() -> None:
    key = "k" * 16
    here, there = (ChatART(model=m, base_url=f"http://{m}:1/v1", api_key=key) for m in "ab")
    with pytest.raises(ConfigError, match="several servers"):
        Trainer([here, there])
    with pytest.raises(ConfigError, match="only once"):
        Trainer([here, "a"])
    with pytest.raises(ConfigError, match="at least one"):
        Trainer([])
    both = Trainer([here, "c"])
    client = both._client()
    assert both.policies == ("a", "c")
    assert (client.base_url, client.api_key) == ("http://a:1/v1", "k" * 16)
    with pytest.raises(ConfigError, match="several policies"):
        _ = both.policy
    with ArtClient("http://other:1/v1") as other:
        assert Trainer("p", client=other)._client().base_url == "http://other:1/v1"


# --- policies with configs of their own -----------------------------------------------------------


async def test_a_policy_without_a_config_plays_and_does_not_learn(
    art_server: LiveServer, tmp_path: Path
) -> None:
    writer, critic = name(), name()
    graph = two_nodes(model_of(art_server, writer), model_of(art_server, critic))
    both = trainer_of(art_server, tmp_path / "both", writer, critic)
    assert (await both.fit(graph, QUESTIONS, steps=1)).versions == {writer: 1, critic: 1}
    frozen: dict[str, Any] = {writer: TrainConfig(), critic: None}
    trainer = trainer_of(art_server, tmp_path / "one", writer, critic, config=frozen)
    found = await trainer.fit(graph, QUESTIONS, steps=1, eval_scenarios=QUESTIONS[:2], fresh=True)
    assert found.adapter == f"{writer}@2"
    assert [e.versions for e in found.evals] == [(f"{writer}@{n}", f"{critic}@1") for n in (0, 2)]
    assert all(step.results.keys() == {writer} for step in found.history)
    with client_of(art_server) as client:
        assert client.policy(critic).version == 1, "what does not learn is not rolled back either"


async def test_more_policies_than_the_sampler_computes_at_once_are_refused(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is vLLM's, so that the real server's status is given one here."""
    status, policies, bound = AsyncArtClient.status, [name(), name()], dict[str, int]()

    async def told(self: AsyncArtClient) -> ServerStatus:
        return (await status(self)).model_copy(update=bound)

    monkeypatch.setattr(AsyncArtClient, "status", told)
    for changes, words in (
        ({"max_loras": 1}, "got 2 policies, and .* computes 1 adapters at once, .* max_loras = 2"),
        ({"max_policies": 1}, r"would have to be made, and the server has \d+ of at most 1"),
    ):
        bound = changes
        with pytest.raises(ConfigError, match=words):
            await trainer_of(art_server, tmp_path, *policies).fit(lambda _: 1.0, QUESTIONS, steps=1)
    with client_of(art_server) as client:
        assert not {one.name for one in client.policies()} & set(policies), "none was made"


async def test_a_policy_that_is_made_is_said_once(art_server: LiveServer, tmp_path: Path) -> None:
    """A misspelled name would make one without a word."""
    policy = name()
    trainer = trainer_of(art_server, tmp_path, policy)
    for fresh in (True, False):
        await trainer.fit(lambda _: 1.0, QUESTIONS, steps=1, fresh=fresh)
    assert said(trainer).count(f"no policy {policy!r} yet: it is made, from the base") == 1


# --- runs that fail -------------------------------------------------------------------------------


async def test_failed_runs_train_nothing_and_enter_no_baseline_unless_they_are_rewarded(
    art_server: LiveServer, tmp_path: Path
) -> None:
    """Rewards 1, 0 and -1 for one of two failures: |A| is 2/3."""
    policy = name()
    model = model_of(art_server, policy)
    place = {"q-0": 0, "q-1": 0}

    async def rollout(scenario: dict[str, str]) -> Run:
        turn = place[scenario["id"]]
        place[scenario["id"]] += 1
        async with capture(scenario=scenario["id"]) as run:
            await model.ainvoke(scenario["input"])
            if turn == 2:
                run.reward = -1.0
            if turn >= 2:
                raise ValueError("tool broke")
            run.reward = float(turn)
        return run

    trainer = trainer_of(art_server, tmp_path, policy, evaluator=None)
    [step] = (await trainer.fit(rollout, QUESTIONS[:2], steps=1)).history
    assert (step.failed, step.excluded) == (4, {"runs.failed": 2})
    [report] = step.nodes.values()
    assert (report.calls, report.advantage_abs) == (6, pytest.approx(2 / 3))
    with client_of(art_server) as client:
        failed = [t for t in client.trajectories(8) if t.status == "failed"]
        assert len(failed) == 4
        for run in failed:
            assert bool(client.audit(run.id).trained_by) is (run.reward is not None)


# --- the audit on the command line ----------------------------------------------------------------


async def test_the_audit_is_a_command(
    art_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    # Of unseeded replies one in a hundred holds a special token, which is no text and is not sent
    # back: the critic's prompt then forks.
    model = model_of(art_server, art_server.policy, seed=1)
    with capture(scenario="audited") as run:
        await two_nodes(model, model).ainvoke({"messages": [("user", "Hi")]})
        run.reward = 1.0
    told: Trajectory = run.trajectory()
    with client_of(art_server) as client:
        client.post_trajectory(told)

    def text(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["audit", *arguments], env={"COLUMNS": "80"})
        assert done.exit_code == 0, done.output
        return done.output

    machine = json.loads(text(told.id, "--json"))
    writer, critic = (turn["sampled_tokens"] for turn in machine["turns"])
    assert machine["trained_tokens"] == machine["sampled_tokens"] == writer + critic > 0
    shown = text(told.id, "--trainable", "critic=false", "--policy", art_server.policy)
    assert max(map(len, shown.splitlines())) <= 80
    total = f"{writer} of {writer + critic} sampled tokens learn"
    for word in (total, "Not trained yet", "evaluation", "extends"):
        assert word in shown
    rows = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines()]
    told_of = {row[2]: (row[5], row[6], row[8]) for row in rows if len(row) > 8 and row[1]}
    assert told_of["writer"] == (str(writer), str(writer), "-")
    assert told_of["critic"] == (str(critic), "0", "frozen")
    done = CliRunner().invoke(app, ["audit", told.id, "--trainable", "critic=maybe"])
    assert isinstance(done.exception, ConfigError)
