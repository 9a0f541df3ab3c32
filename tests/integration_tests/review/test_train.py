"""A policy learns from people's rewards, which hold for that job alone."""

import json
import uuid
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from langchain_art.cli.review_train import show_answers
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError, Conflict, InvalidRequest, JobFailed
from langchain_art.wire import (
    ReviewPlan,
    ReviewTraining,
    TrainConfig,
    TrainJob,
    TrainResult,
    Trajectory,
)
from langchain_art.wire.trajectories import EVALUATION
from tests.support.json_server import JsonServer, Refusal, completion
from tests.support.live_server import LiveServer
from tests.support.reviewed_runs import Command, MakeRuns, human_reward


def test_the_reward_that_is_trained_is_the_persons(
    own_policy: str,
    make_runs: MakeRuns,
    review: Command,
    client: ArtClient,
) -> None:
    runs = make_runs(4)
    for run in runs:  # all equal: of their own rewards there would be nothing to learn
        client.reward(run, 0.5)
    groups = [[run.id for run in runs]]
    own = client.wait(client.train(groups, own_policy))
    assert own.version == 0 and own.excluded
    with pytest.raises(ConfigError, match="expected runs of `groups`"):
        client.train(groups, own_policy, rewards={"another": 1.0})
    client.put_reviews([human_reward(run, i % 2) for i, run in enumerate(runs[:3])])
    foreseen = review("train", own_policy, "--dry-run")
    assert "writer: 3 calls by rewards, 0 corrections" in foreseen and "serves" not in foreseen
    with pytest.raises(ConfigError, match=r"got the scores \['typo'\].*: \['human_reward'\]"):
        review("train", own_policy, "--name", "typo")
    told = review("train", own_policy)
    assert told.startswith(foreseen)
    assert "3 runs and 0 single calls of 1 scenarios are trained on" in told
    assert f"{own_policy}@1 serves" in told
    assert all(client.trajectory(run).reward == 0.5 for run in runs)


def test_a_verdict_on_a_call_is_that_calls_reward(
    art_server: LiveServer, own_policy: str, client: ArtClient
) -> None:
    """By hand: runs A and B are worth 1 and 0, the writer's calls of A and C 0 and 1."""
    policy, scenario = own_policy, uuid.uuid4().hex
    runs = [sampled(art_server, policy, scenario, f"{name}-{scenario}") for name in "abc"]
    a, b, c = runs
    said = [human_reward(a, 1.0), human_reward(b, 0.0)]
    said += [
        human_reward(run, value, id=f"w-{run.id}", call_id=run.turns[1].call_id)
        for run, value in ((a, 0.0), (c, 1.0))
    ]
    assert client.put_reviews(said).new == 4
    config = TrainConfig(credit="call", advantage="mean")
    asked = ReviewTraining(policy=policy, config=config)
    planned = client.plan_reviews(asked)
    with pytest.raises(InvalidRequest, match=r"got rewards for the calls .*'another'"):
        client.train(planned.groups, policy, turns={"another": 1.0})
    with pytest.raises(Conflict, match="Ask for the plan again"):
        client.train_reviews(asked.model_copy(update={"plan": "another"}))
    [job] = client.train_reviews(asked.model_copy(update={"plan": planned.digest}), key=policy)
    assert client.train_reviews(asked.model_copy(update={"plan": planned.digest}), key=policy)
    assert client.train_reviews(asked) == []
    assert len(client.jobs(policy)) == 1
    found = client.wait(job)
    kept = [client.trajectory(run.id) for run in runs]

    def mean(node: int, **advantages: float) -> float:
        """Of the node's trained tokens, by the run's letter."""
        count = {run.id[0]: run.turns[node].usage for run in runs}
        tokens = {run: one.completion_tokens for run, one in count.items() if one is not None}
        total = sum(tokens[run] for run in advantages)
        return sum(tokens[run] * value for run, value in advantages.items()) / total

    planner, writer = found.nodes["planner"], found.nodes["writer"]
    assert {name: one.calls for name, one in planned.nodes.items()} == {
        name: one.calls for name, one in found.nodes.items()
    }
    assert (planner.calls, planner.excluded) == (2, {"unscored": 1})
    assert planner.advantage_mean == pytest.approx(mean(0, a=0.5, b=-0.5))
    assert planner.advantage_abs == pytest.approx(0.5)
    assert (writer.calls, writer.excluded) == (3, {})
    assert writer.advantage_mean == pytest.approx(mean(1, a=0.5 - 0.5, b=-0.5, c=0.5))
    assert writer.advantage_abs == pytest.approx(mean(1, a=0.0, b=0.5, c=0.5))
    assert found.version == 1
    assert all(one.total_return is None for one in kept)


def sampled(server: LiveServer, policy: str, scenario: str, run: str) -> Trajectory:
    """A run of a planner and a writer, without a reward."""
    with server.http() as http:
        for seed, node in enumerate(("planner", "writer")):
            asked = {
                "model": policy,
                "messages": [{"role": "user", "content": f"As {node}."}],
                "max_tokens": 3 + seed,
                "seed": ord(run[0]) + seed,
                "art": {"trajectory_id": run, "node": node, "scenario": scenario},
            }
            http.post("/v1/chat/completions", json=asked).raise_for_status()
        answer = http.put(f"/v1/trajectories/{run}/reward", json={"scenario": scenario})
    return Trajectory.model_validate_json(answer.raise_for_status().content)


def test_a_correction_is_preferred_from_then_on(
    own_policy: str,
    make_runs: MakeRuns,
    review: Command,
    client: ArtClient,
) -> None:
    about: dict[str, Any] = {"kind": "correction", "name": "correction"}
    run = make_runs(1)[0]
    for turn in run.turns:
        for at, text in enumerate(("No idea.", "On 14 March.")):
            reply = {"role": "assistant", "content": text}
            about |= {"id": f"{turn.call_id}-{at}", "call_id": turn.call_id}
            said = human_reward(run, None, float(at), correction=reply, **about)
            client.put_reviews([said])
    options = ("--learning-rate", "0.003", "--correction-steps", "3")
    told = review("train", own_policy, *options)
    assert client.policy(own_policy).version == 3
    jobs = client.jobs(own_policy)
    metrics = [job.result.metrics for job in jobs if job.result]
    sampled = [sum(client.call(turn.call_id or "")["logprobs"]) for turn in run.turns]
    count = len(run.turns)
    moved = f"{metrics[0]['chosen_logprob']:.3f} -> {metrics[-1]['chosen_logprob_after']:.3f}"
    assert f"chosen_logprob: {moved}, before the first step and after the last" in told
    assert metrics[-1]["chosen_logprob_after"] > metrics[-1]["chosen_logprob"]
    assert f"{count} corrected replies are trained on" in told
    assert f"left out: {count} corrections: are of a call that a later one corrects" in told
    assert "should be: On 14 March." in told and "is now:" in told
    assert [one["pairs_trained"] for one in metrics] == [count] * 3
    assert metrics[-1]["chosen_logprob"] > metrics[0]["chosen_logprob"]
    assert metrics[-1]["preference_margin"] > 0
    assert metrics[0]["rejected_logprob"] == pytest.approx(sum(sampled) / count, abs=1e-3)


def test_what_serves_is_said_though_the_job_before_it_failed(
    own_policy: str,
    review: Command,
    make_runs: MakeRuns,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    client: ArtClient,
) -> None:
    ended: list[str] = []
    wait = ArtClient.wait

    def fails_once(self: ArtClient, job: TrainJob, *given: Any) -> TrainResult:
        ended.append(job.id)
        result = wait(self, job, *given)
        if len(ended) == 1:
            raise JobFailed("Non-finite gradients. Nothing was published.")
        return result

    monkeypatch.setattr(ArtClient, "wait", fails_once)
    runs = make_runs(2)
    fixed: dict[str, Any] = {"id": f"c-{runs[0].id}", "call_id": runs[0].turns[0].call_id}
    fixed |= {"kind": "correction", "name": "correction"}
    fixed |= {"correction": {"role": "assistant", "content": "On 14 March."}}
    rewards = [human_reward(run, i) for i, run in enumerate(runs)]
    client.put_reviews([*rewards, human_reward(runs[0], None, **fixed)])
    with pytest.raises(JobFailed, match="Non-finite gradients"):
        review("train", own_policy, "--correction-steps", "1")
    version = client.policy(own_policy).version
    assert len(ended) == 2
    assert f"{own_policy}@{version} serves" in capsys.readouterr().out


class Answers(JsonServer):
    """Has a corrected call whose messages LangChain does not read; refuses the second question."""

    def answer(self, path: str, body: Any) -> Any:
        if path.endswith("/chat/completions"):
            if len(self.requests) > 1:
                raise Refusal(400)
            return completion("p", {"role": "assistant", "content": "On 14 March."}, 9, 4)
        turn = {"messages": NO_IDS, "reply": {"role": "assistant", "content": path[-1]}}
        return {"id": path[-1], "turns": [turn]}


NO_IDS: list[dict[str, Any]] = [
    {"role": "user", "content": "When?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
    {"role": "tool", "content": "14 March"},
]


def test_a_corrected_call_is_asked_again_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = (("a", "b"), ("a", "b"))
    plan = ReviewPlan(verdicts=(), groups=(), rewards={}, turns={}, compared=(), pairs=pairs)
    with Answers() as server, ArtClient(server.url) as client:
        show_answers(client, plan, "p")
    told = capsys.readouterr().out
    assert [body["messages"] for _, body in server.requests] == [NO_IDS] * 2
    assert "is now:    On 14 March." in told and "is now:    not answered: Error code: 400" in told


ROLLOUT = """
from langchain_openai import ChatOpenAI

gpt = ChatOpenAI(model={policy!r}, base_url={url!r}, api_key="none", max_tokens=3)

async def rollout(scenario):
    return len((await gpt.ainvoke(scenario["question"])).text) / 100
"""


def test_held_out_scenarios_are_measured_before_and_after(
    art_server: LiveServer,
    own_policy: str,
    make_runs: MakeRuns,
    review: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    client: ArtClient,
) -> None:
    policy = own_policy
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = f"held_out_{uuid.uuid4().hex[:8]}"
    source = ROLLOUT.format(policy=policy, url=art_server.base_url)
    (tmp_path / f"{module}.py").write_text(source)
    held_out = [json.dumps({"id": f"q-{n}", "question": f"Colour {n}?"}) for n in range(3)]
    (tmp_path / "held_out.jsonl").write_text("\n".join(held_out))
    with pytest.raises(ConfigError, match="expected a name of 1-64 characters"):
        review("train", "no policy")
    for alone in (["--samples", "2"], ["--rollout", f"{module}:rollout"], ["--root", "out"]):
        with pytest.raises(ConfigError, match="--rollout and --scenarios together"):
            review("train", policy, *alone)
    runs = make_runs(2)
    client.put_reviews([human_reward(run, i) for i, run in enumerate(runs)])
    options = ["--rollout", f"{module}:rollout", "--scenarios", "held_out.jsonl"]
    told = review("train", policy, *options, "--samples", "2")
    marked = [
        (run.metadata[EVALUATION], run.total_return)
        for run in client.trajectories(1000)
        if str(run.metadata.get(EVALUATION, "")).startswith(policy)
    ]
    means = [fmean(w or 0.0 for v, w in marked if v == f"{policy}@{n}") for n in (0, 1)]
    assert len(marked) == 12
    assert f"held-out reward before: {policy}@0: {means[0]:.3f}" in told
    assert f"held-out reward after:  {policy}@1: {means[1]:.3f}" in told
    assert f"held-out change: {means[1] - means[0]:+.3f} ± " in told
