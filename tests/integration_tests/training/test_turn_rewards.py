"""Rewards of single calls, advantages and losses of the user: how they are given, what training
makes of them, and that a job learns from what was scored when it was asked for.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage

from langchain_art import ArtClient, ChatART, OwnLoss, TrainConfig, Trainer, capture
from langchain_art.errors import ConfigError, InvalidRequest, JobFailed, NotFound, RequestRefused
from langchain_art.wire import Reward, TrainResult, Trajectory, TrajectoryGroup
from tests.integration_tests.training.test_trainable import runs_of as rewarded
from tests.support.chat_models import model_of
from tests.support.graphs import ASK, graph_of, node
from tests.support.live_server import ForkedServer, LiveServer
from tests.support.steps_of_a_fit import new_id, ok
from tests.support.trainers import asking, said, trainer_of


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
    assert "by node: writer 1.000, noise 0.250" in said(trainer)


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


# --- advantages and losses of the user's own ------------------------------------------------------


SCENARIOS = [{"id": f"q-{i}", "question": f"Say {i}"} for i in range(8)]


class Fit:
    """A trainer with a hook. All rewards are equal: built-in estimators would learn nothing."""

    def __init__(self, server: LiveServer, folder: Path, hook: Any, reward: float | None) -> None:
        self.server, self.folder, self.policy = server, folder, new_id("own")
        self.trainer = self.trainer_with(hook)
        self.rollout = asking(lambda *_: reward, model_of(server, self.policy, max_tokens=4))

    def trainer_with(self, hook: Any) -> Trainer:
        options = {"group_size": 2, "advantages": hook, "dynamic_sampling_rounds": 3}
        return trainer_of(self.server, self.folder, self.policy, **options)

    async def fit(self, steps: int) -> Any:
        return await self.trainer.fit(self.rollout, SCENARIOS, steps=steps)


def first_is_better(group: TrajectoryGroup) -> list[Any]:
    """The first run's tokens, one by one; the second run by one number."""
    turn = group.trajectories[0].turns[0]
    assert turn.usage is not None
    return [[[1.0] + [0.5] * (turn.usage.completion_tokens - 1)], -1.0]


async def test_a_fit_learns_from_the_numbers_of_a_function(
    art_server: LiveServer, tmp_path: Path
) -> None:
    own = Fit(art_server, tmp_path, first_is_better, 1.0)
    found = await own.fit(2)
    assert found.version == 2 and not found.excluded
    assert [(one.own_advantages, one.resampled) for one in found.history] == [(True, 0)] * 2
    assert "of 2 steps given by Trainer(advantages=…)" in said(own.trainer)
    with ArtClient(art_server.base_url) as client, art_server.http() as http:
        job = client.jobs(found.policy)[0]
        first, second = runs_of(client, http, job.id, found.policy)
        assert first["reward"] == 1.0
        [turn] = first["turns"]
        tokens = turn["token_advantages"]
        assert tokens[0] == 1.0 and set(tokens[1:]) <= {0.5}
        assert turn["advantage"] == pytest.approx(sum(tokens) / len(tokens))
        assert second["turns"][0]["token_advantages"] is None
        assert second["turns"][0]["advantage"] == -1.0


def runs_of(client: ArtClient, http: httpx.Client, job: str, policy: str) -> list[dict[str, Any]]:
    """The advantages that the job gave to both runs of one group, the better one first."""
    listed = http.get("/page/runs", params={"policy": policy, "step": 1}).json()["runs"]
    scenario = client.trajectory(listed[0]["id"]).scenario
    mine = [one["id"] for one in listed if client.trajectory(one["id"]).scenario == scenario]
    given = [http.get(f"/page/runs/{one}/credit/{job}").json() for one in mine]
    return sorted(given, key=lambda one: -one["turns"][0]["advantage"])


async def test_a_fit_that_was_interrupted_sends_the_same_numbers(
    art_server: LiveServer, tmp_path: Path
) -> None:
    """They are stored with the step, whose runs have no reward; another function is another fit."""
    asked = list[str]()

    def hook(group: TrajectoryGroup) -> list[float]:
        asked.append(group.id)
        return [0.5, -0.5]

    own = Fit(art_server, tmp_path, hook, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("langchain_art.client.async_client.AsyncArtClient.train", broken)
        with pytest.raises(RuntimeError, match="the client's end"):
            await own.fit(1)
    assert len(asked) == 2
    found = await own.fit(1)
    assert len(asked) == 2 and found.history[0].own_advantages and found.version == 1
    assert found.history[0].reward_mean is None and not found.excluded
    with ArtClient(art_server.base_url) as client, art_server.http() as http:
        run = http.get("/page/runs", params={"policy": own.policy}).json()["runs"][0]["id"]
        with pytest.raises(RequestRefused, match="got 2 advantages for the 1 turns"):
            client.train([[run]], own.policy, advantages={run: (1.0, 2.0)})
    other = own.trainer_with(first_is_better)
    with pytest.raises(ConfigError, match="the advantage function's source"):
        await other.fit(own.rollout, SCENARIOS, steps=2)


def broken(*given: Any, **options: Any) -> Any:
    raise RuntimeError("the client's end")


# --- losses ---------------------------------------------------------------------------------------

REGISTERED = '[losses]\nclipped = "tests.support.own_losses:clipped"\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with ForkedServer(tmp_path_factory.mktemp("own-losses") / "data", settings=REGISTERED) as made:
        yield made


def test_a_registered_loss_makes_the_bytes_that_the_built_in_one_makes(server: LiveServer) -> None:
    with server.http() as http, ArtClient(server.base_url) as client:
        assert client.status().losses == ("clip", "gspo", "cispo", "dppo_tv", "clipped")
        runs = rewarded(http, (0.0, 1.0, 2.0))
        made: list[bytes] = []
        for loss in ("clip", "clipped", OwnLoss(name="clipped", options={"high": 1e-6})):
            config = TrainConfig(learning_rate=1e-3, loss=loss, optimizer_steps=2, max_kl=None)
            client.rollback("tiny", 0)
            result = client.wait(client.train([runs], "tiny", config, retrain=True))
            path = server.data_dir / "adapters" / "tiny" / str(result.version)
            made.append((path / "adapter_model.safetensors").read_bytes())
        assert made[0] == made[1]
        assert made[0] != made[2], "options count"
        with pytest.raises(InvalidRequest, match=r"'clippd', expected one of .*'clipped'"):
            client.train([runs], "tiny", TrainConfig(loss="clippd"), retrain=True)
        wrong = TrainConfig(loss=OwnLoss(name="clipped", options={"bound": 1.0}))
        with pytest.raises(JobFailed, match=r"got options=.*bound.* for the loss 'clipped'"):
            client.wait(client.train([runs], "tiny", wrong, retrain=True))


async def test_a_fit_refuses_a_loss_that_is_not_there_before_its_first_run(
    server: LiveServer, tmp_path: Path
) -> None:
    began: list[object] = []
    trainer = trainer_of(server, tmp_path, "mistaken", config=TrainConfig(loss="gsop"))
    with pytest.raises(ConfigError, match="got the loss 'gsop' for 'mistaken', expected one of"):
        await trainer.fit(began.append, SCENARIOS, steps=1)
    assert not began


def test_a_loss_that_cannot_be_imported_ends_the_start(tmp_path: Path) -> None:
    settings = '[losses]\nmine = "no_such_package.losses:mine"\n'
    refused = ForkedServer(tmp_path / "data", settings=settings).refusal()
    assert "[losses] mine = 'no_such_package.losses:mine' cannot be imported" in refused
