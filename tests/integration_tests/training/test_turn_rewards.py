"""Rewards of single calls: set by a rollout, over HTTP and by the client; what training makes of
them, and that a job learns from what was scored when it was asked for.
"""

from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage

from langchain_art import ArtClient, ChatART, TrainConfig, capture
from langchain_art.errors import ConfigError, InvalidRequest, NotFound
from langchain_art.wire import Reward, TrainResult, Trajectory
from tests.support.chat_models import model_of
from tests.support.graphs import ASK, graph_of, node
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id, ok
from tests.support.trainers import said, trainer_of


def two_nodes(model: ChatART) -> Any:
    return graph_of(writer=node(model), noise=node(model)).compile()


def tagged_run(http: httpx.Client, nodes: tuple[str, ...] = ("writer", "noise")) -> list[str]:
    """A run's id and those of its calls."""
    run, calls = new_id("t"), list[str]()
    for seed, name in enumerate(nodes):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"As {name}."}],
            "max_tokens": 8,
            "seed": seed,
            "art": {"trajectory_id": run, "node": name},
        }
        calls.append(ok(http.post("/v1/chat/completions", json=body))["id"])
    return [run, *calls]


def test_a_graphs_nodes_are_scored_one_by_one(art_server: LiveServer, tmp_path: Path) -> None:
    policy, values = new_id("p"), iter([0.0, 1.0, 2.0, 3.0] * 2)
    graph = two_nodes(model_of(art_server, policy))

    def rollout(_: dict[str, str]) -> Any:
        with capture() as run:
            written = graph.invoke(ASK)["messages"][1]
            run.reward_turn(written, next(values))
            run.reward_node("noise", 0.25)
        return run

    def learned(credit: str) -> Any:
        config = TrainConfig(credit=credit, learning_rate=2e-5)
        options = {"groups_per_step": 1, "config": config, "concurrency": 1}
        trainer = trainer_of(art_server, tmp_path / credit, policy, **options)
        return trainer.fit_sync(rollout, [{"id": "q"}], steps=1).nodes

    by_node = learned("node")
    assert by_node["writer"].calls == 4 and by_node["writer"].advantage_abs > 0.5
    assert (by_node["noise"].calls, by_node["noise"].excluded) == (0, {"zero_variance": 4})
    by_turn = learned("turn")  # every call of a turn of `noise` is worth the same, less the mean
    assert by_turn["writer"].calls == by_turn["noise"].calls == 4
    assert by_turn["noise"].advantage_abs == pytest.approx(-by_turn["noise"].advantage_mean)


def test_rewards_of_nodes_alone_are_shown_and_evaluated(
    art_server: LiveServer, tmp_path: Path
) -> None:
    policy, values = new_id("p"), iter([0.5, 0.5, *[0.0, 1.0] * 4, 1.0, 1.0])
    graph = two_nodes(model_of(art_server, policy))

    def rollout(_: dict[str, str]) -> Any:
        with capture() as run:
            graph.invoke(ASK)
            run.reward_node("writer", next(values))
            run.reward_node("noise", 0.25)
        return run

    trainer = trainer_of(art_server, tmp_path, policy, concurrency=1)
    scenarios = [{"id": "q"}, {"id": "r"}]
    found = trainer.fit_sync(rollout, scenarios, steps=1, eval_scenarios=scenarios)
    [step] = found.history
    assert (step.reward_mean, step.reward_std) == (0.75, pytest.approx(0.5345, abs=1e-4))
    assert step.node_rewards == {"writer": 0.5, "noise": 0.25}
    assert found.before is not None and found.best is not None
    assert (found.before.mean, found.before.unscored) == (0.75, 0)
    assert (found.best.mean, found.best.step) == (1.25, 1), "not the first of equals"
    shown = said(trainer)
    assert "reward 0.750" in shown and "no rewards" not in shown and "unscored" not in shown
    assert "by node: writer 1.000, noise 0.250" in shown


def test_what_is_no_call_of_the_run_is_refused(art_server: LiveServer) -> None:
    with capture() as run:
        _, written, noise = two_nodes(model_of(art_server)).invoke(ASK)["messages"]
    words = r"AIMessage\(.*which names no call, expected the id or the reply of one of the 2 calls"
    with pytest.raises(ConfigError, match=words):
        run.reward_turn(AIMessage("not heard"), 1.0)
    with pytest.raises(ConfigError, match=r"\['noise', 'writer'\]"):
        run.reward_node("critic", 1.0)
    with pytest.raises(ConfigError, match="finite"):
        run.reward_turn(written, float("nan"))
    assert [turn.reward for turn in run.turns] == [None, None]
    run.reward_turn(run.turns[0], 1)
    run.reward_turn(noise, 2.0)
    assert [turn.reward for turn in run.trajectory().turns] == [1.0, 2.0]
    run.reward_node("writer", None)
    assert [turn.reward for turn in run.trajectory().turns] == [None, 2.0]


def test_rewards_of_calls_over_http_and_by_the_client(
    http: httpx.Client, client: ArtClient
) -> None:
    run, first, second = tagged_run(http)
    path = f"/v1/trajectories/{run}/reward"
    answer = http.put(path, json={"reward": 0.5, "turns": {second: 2.0}})
    assert [turn["reward"] for turn in answer.json()["turns"]] == [None, 2.0]
    answer = http.put(path, json={"turns": {first: 1.0}})  # and leaves alone what is not given
    told = Trajectory.model_validate(answer.json())
    assert (told.reward, [turn.reward for turn in told.turns]) == (0.5, [1.0, 2.0])
    answer = http.put(path, json={"turns": {second: None}})
    assert [turn["reward"] for turn in answer.json()["turns"]] == [1.0, None]
    kind = {"Content-Type": "application/json"}
    content = f'{{"turns": {{"{first}": NaN}}}}'
    assert http.put(path, content=content, headers=kind).status_code == 400
    told = client.reward(run, 0.25, {second: 0.0})
    assert (told.reward, [turn.reward for turn in told.turns]) == (0.25, [1.0, 0.0])
    told = client.reward(run, Reward(scores={"human": 1.0}))
    assert (told.reward, told.scores) == (0.25, {"human": 1.0})
    with pytest.raises(InvalidRequest, match=r"chatcmpl-none.* its 2 calls"):
        client.reward(run, turns={"chatcmpl-none": 1.0})
    with pytest.raises(NotFound):
        client.reward(new_id("t"), turns={first: 1.0})
    with pytest.raises(ConfigError, match="finite"):
        client.reward(run, turns={first: float("nan")})


def test_a_job_with_credit_by_turn_uses_them_as_they_were(
    http: httpx.Client, client: ArtClient
) -> None:
    """The second job waits behind the first; what is changed meanwhile is not its business."""
    runs = [tagged_run(http) for _ in range(4)]
    behind = [tagged_run(http) for _ in range(4)]
    for number, (run, first, second) in enumerate(runs + behind):
        client.reward(run, turns={first: float(number % 4), second: 0.0})
    config = TrainConfig(credit="turn", advantage="mean", optimizer_steps=8, learning_rate=2e-5)
    groups = ([run for run, _, _ in group] for group in (runs, behind))
    jobs = [client.train([group], "tiny", config, key=new_id("k")) for group in groups]
    for run, first, second in behind:
        client.reward(run, turns={first: 7.0, second: 7.0})
    told: list[TrainResult] = [client.wait(job) for job in jobs]
    for result in told:  # returns 0, 1, 2, 3 and 0; the mean of the runs' means is 0.75
        assert result.nodes["writer"].calls == result.nodes["noise"].calls == 4
        assert result.nodes["noise"].advantage_abs == pytest.approx(0.75)
        assert -0.75 < result.nodes["writer"].advantage_mean <= 2.25
        assert result.nodes["writer"].advantage_mean > 0
    trained, first, _ = runs[1]
    late = http.put(f"/v1/trajectories/{trained}/reward", json={"turns": {first: 9.0}})
    assert late.status_code == 409
