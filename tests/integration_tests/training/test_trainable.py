"""Which calls learn, for which policy, with which baseline; and the audit that says so before."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from langchain_art.wire import TrainResult, TrajectoryAudit
from langchain_art_server.storage.seals import update
from langchain_art_server.storage.tables import CHECKPOINTS, JOBS, POLICIES, TRAINED, TRAINED_CALLS
from tests.support.live_server import ForkedServer
from tests.support.steps_of_a_fit import new_id, ok, trained

QUESTION = "When is the falcon review?"


def call(http: httpx.Client, run: str, seed: int, model: str = "tiny", **tags: Any) -> str:
    """One tagged call; the reply's text."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 8 + seed,
        "seed": seed,
        "art": {"trajectory_id": run, **tags},
    }
    return ok(http.post("/v1/chat/completions", json=body))["choices"][0]["message"]["content"]


def runs_of(http: httpx.Client, rewards: Sequence[float], *calls: dict[str, Any]) -> list[str]:
    """Runs with these rewards, each of these calls; of one without tags, if none is given."""
    runs = [new_id("t") for _ in rewards]
    for seed, (run, reward) in enumerate(zip(runs, rewards, strict=True)):
        for tags in calls or ({},):
            call(http, run, seed, **tags)
        scored(http, run, reward)
    return runs


def scored(http: httpx.Client, run: str, reward: float) -> str:
    ok(http.put(f"/v1/trajectories/{run}/reward", json={"reward": reward}))
    return run


def train(http: httpx.Client, runs: Sequence[str], **body: Any) -> TrainResult:
    # Runs that are some versions old agree with the learner.
    config = {"learning_rate": 2e-5, "advantage": "mean"}
    job = trained(http, [list(runs)], **{"config": config, **body})
    assert job["state"] == "succeeded", job
    return TrainResult.model_validate(job["result"])


def audit(http: httpx.Client, run: str, **params: Any) -> TrajectoryAudit:
    answer = ok(http.get(f"/v1/trajectories/{run}/audit", params=params))
    return TrajectoryAudit.model_validate(answer)


def test_two_policies_learn_from_the_same_runs(http: httpx.Client) -> None:
    critic = new_id("critic")
    ok(http.post("/v1/policies", json={"name": critic, "lora": {"rank": 4}}))
    runs = runs_of(
        *(http, (0.0, 1.0, 2.0)),
        {"node": "writer", "path": ["team", "writer"]},
        {"model": critic, "node": "critic", "tags": ["judge"]},
        {"model": "base_model", "node": "router"},
    )
    both = audit(http, runs[0])
    assert [turn.excluded_because for turn in both.turns] == [None, None, "other_policy"]
    assert both.rows == 2 and both.trained_by == {}
    before = {name: audit(http, runs[0], policy=name) for name in ("tiny", critic)}
    for policy, node in (("tiny", "team/writer"), (critic, "critic")):
        result = train(http, runs, policy=policy)
        assert result.policy == policy and result.metrics["runs_trained"] == 3
        assert result.excluded == {"calls.other_policy": 6}
        assert [name for name, told in result.nodes.items() if told.tokens] == [node]
    again = train(http, runs, policy=critic)
    assert again.excluded == {"runs.already_trained": 3, "groups.empty": 1}
    after = audit(http, runs[0], policy=critic)
    assert set(after.trained_by) == {"tiny", critic} and after.turns == before[critic].turns
    told = http.put(f"/v1/trajectories/{runs[0]}/reward", json={"reward": 7.0})
    assert told.status_code == 409 and critic in told.text and "'tiny'" in told.text


def test_a_call_is_trained_once_whatever_run_it_is_put_into(http: httpx.Client) -> None:
    runs = runs_of(http, (0.0, 1.0, 2.0))
    first = [ok(http.get(f"/v1/trajectories/{run}")) for run in runs]

    def copies(prefix: str) -> list[str]:
        """The same calls in runs with other ids."""
        made = [run | {"id": f"{prefix}-{run['id']}"} for run in first]
        for run in made:
            ok(http.post("/v1/trajectories", json=run))
        return [run["id"] for run in made]

    one, two, other = copies("one"), copies("two"), copies("other")
    done = train(http, [*runs, *one])
    assert done.metrics["calls_trained"] == 3
    assert done.metrics["tokens_trained"] == sum(audit(http, r).trained_tokens for r in runs)
    assert done.excluded == {"calls.repeated": 3, "runs.without_trainable_calls": 3}
    assert [turn.excluded_because for turn in audit(http, runs[0]).turns] == [None]
    before = ok(http.get("/v1/policies/tiny"))["version"]
    again = train(http, two)
    assert again.excluded["calls.already_trained"] == 3 and again.version == before
    told = audit(http, two[0])
    assert [turn.excluded_because for turn in told.turns] == ["already_trained"]
    asked = train(http, [*other, runs[0]], retrain=True)
    assert asked.metrics["calls_trained"] == 3 and asked.excluded["calls.repeated"] == 1
    assert len(audit(http, other[0]).trained_by) == 1
    assert train(http, copies("late")).excluded["calls.already_trained"] == 3


def test_what_a_discarded_version_trained_is_trained_once_on_each_lineage(
    http: httpx.Client,
) -> None:
    """Versions 1 and 2 on one branch; 1 is discarded; 3 and 4 on another; back to 2, and on."""
    policy = new_id("parted")
    ok(http.post("/v1/policies", json={"name": policy, "lora": {"rank": 4}}))

    def back_to(version: int) -> None:
        ok(http.post(f"/v1/policies/{policy}/rollback", json={"version": version}))

    def trained(runs: Sequence[str], **body: Any) -> TrainResult:
        return train(http, runs, policy=policy, **body)

    one, two = (runs_of(http, (0.0, 1.0), {"model": policy}) for _ in range(2))
    copies = [ok(http.get(f"/v1/trajectories/{run}")) | {"id": new_id("copy")} for run in one]
    for run in copies:
        ok(http.post("/v1/trajectories", json=run))
    assert trained(one).version == 1 and trained(two).version == 2
    back_to(1)
    assert trained(one).excluded["runs.already_trained"] == 2
    again = trained(two)
    assert again.version == 3 and "runs.already_trained" not in again.excluded
    assert trained(two).excluded["runs.already_trained"] == 2
    back_to(2)  # the branch of the first training
    assert trained(two).excluded["runs.already_trained"] == 2
    back_to(0)
    whys = [turn.excluded_because for turn in audit(http, copies[0]["id"]).turns]
    assert whys == [None], "as a job would find it"
    assert trained([run["id"] for run in copies]).version == 4
    whys = [turn.excluded_because for turn in audit(http, copies[0]["id"]).turns]
    assert whys == [None], "its own job"
    assert trained(one).excluded["calls.already_trained"] == 2
    assert trained(one, retrain=True).version == 5
    back_to(4)  # what was trained on purpose is discarded, and what was before it is not
    assert trained(one).excluded["calls.already_trained"] == 2


def test_frozen_calls_never_enter_a_baseline(http: httpx.Client) -> None:
    frozen = {"node": "helper", "tags": ["frozen"]}
    runs = runs_of(http, (1.0, 0.0, 0.5), {"node": "writer"}, frozen)
    alone = new_id("t")
    call(http, alone, 3, **frozen)
    scored(http, alone, 30.0)
    choice = {"trainable": ["frozen:false"], "policy": "tiny"}
    audits = [audit(http, run, **choice) for run in [*runs, alone]]
    assert [turn.excluded_because for turn in audits[0].turns] == [None, "frozen"]
    assert audits[3].trained_tokens == 0 < audits[3].sampled_tokens
    result = train(http, [*runs, alone], trainable={"frozen": False})
    assert result.excluded == {"runs.without_trainable_calls": 1, "calls.frozen": 4}
    assert result.metrics["runs_trained"] == 3 and result.metrics["reward_mean"] == 0.5
    writer, helper = result.nodes["writer"], result.nodes["helper"]
    assert (helper.calls, helper.tokens, helper.excluded) == (0, 0, {"frozen": 4})
    assert helper.advantage_mean == helper.advantage_abs == 0.0
    # Rewards 1, 0, .5 have the mean .5, not 7.875, so the advantages are .5, -.5 and 0.
    tokens = [told.trained_tokens for told in audits]
    total = sum(tokens)
    assert writer.tokens == total
    assert writer.advantage_mean == pytest.approx((tokens[0] - tokens[1]) * 0.5 / total)
    assert writer.advantage_abs == pytest.approx((tokens[0] + tokens[1]) * 0.5 / total)


def test_names_that_no_call_has_are_said(http: httpx.Client) -> None:
    runs = runs_of(http, (0.0, 1.0), {"node": "writer"})
    before = ok(http.get("/v1/policies/tiny"))["version"]
    result = train(http, runs, trainable={"writter": True, "tiny": True, "critic": False})
    assert result.version == before + 1
    job = ok(http.get("/v1/jobs", params={"policy": "tiny"}))["data"][-1]["id"]
    said = [event["message"] for event in ok(http.get(f"/v1/jobs/{job}/events"))["data"]]
    assert any("['critic', 'writter']" in line for line in said), said


def test_an_audit_refuses_bad_input_by_name(http: httpx.Client) -> None:
    [run] = runs_of(http, (1.0,))
    refused: tuple[tuple[str, dict[str, Any], int, str], ...] = (
        (run, {"policy": "nobody"}, 404, "nobody"),
        (run, {"trainable": "writer:maybe"}, 400, "NAME:true or NAME:false"),
        (run, {"trainable": ["writer:true", "writer:false"]}, 400, "expected one of them"),
        (run, {"trainable": ["a:true"] * 257}, 400, "trainable"),
        ("nobody", {}, 404, "nobody"),
    )
    for asked, params, status, words in refused:
        answer = http.get(f"/v1/trajectories/{asked}/audit", params=params)
        assert answer.status_code == status, answer.text
        assert words in answer.json()["error"]["message"]
    body = {"policy": "tiny", "groups": [["x"]], "trainable": {"a": "perhaps"}}
    answer = http.post("/v1/train", json=body, headers={"Idempotency-Key": new_id("k")})
    assert answer.status_code == 400 and "trainable" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_job_that_ends_after_a_crash_reports_the_same(tmp_path: Path) -> None:
    with ForkedServer(tmp_path / "data") as server:
        with server.http() as http:
            runs = runs_of(http, (0.0, 1.0), {"node": "writer"}, {"node": "helper"})
            first = train(http, runs, trainable={"writer": True})
            job = ok(http.get("/v1/jobs"))["data"][0]["id"]
        server.kill()
        # As a crash leaves it between the version's publishing and the job's end.
        engine = sa.create_engine(f"sqlite:///{server.data_dir / 'art.sqlite3'}")
        with engine.begin() as database:
            running = {"state": "running", "result": None, "finished_at": None}
            update(database, JOBS, sa.true(), running)
            database.execute(sa.delete(TRAINED))
            database.execute(sa.delete(TRAINED_CALLS))
            database.execute(sa.delete(CHECKPOINTS).where(CHECKPOINTS.c.version == 1))
            update(database, POLICIES, sa.true(), {"version": 0})
        engine.dispose()
        server.start()
        with server.http() as http:
            told = ok(http.get(f"/v1/jobs/{job}", params={"wait": 30}))
            second = TrainResult.model_validate(told["result"])
            assert second.nodes == first.nodes and first.nodes["writer"].tokens > 0
            assert (second.version, second.excluded) == (first.version, first.excluded)
            told_again = second.metrics.keys() - {"swap_seconds"}
            assert [second.metrics[k] for k in told_again] == [first.metrics[k] for k in told_again]
            assert audit(http, runs[0]).trained_by == {"tiny": job}
            assert train(http, runs).excluded["runs.already_trained"] == 2


def test_a_key_gives_its_job_also_when_a_run_of_it_was_deleted_since(http: httpx.Client) -> None:
    runs = runs_of(http, (0.0, 1.0))
    body = {"policy": "tiny", "groups": [runs], "config": {"learning_rate": 2e-5}}
    headers = {"Idempotency-Key": new_id("k")}
    job = ok(http.post("/v1/train", json=body, headers=headers))
    assert ok(http.get(f"/v1/jobs/{job['id']}", params={"wait": 30}))["state"] == "succeeded"
    ok(http.delete(f"/v1/trajectories/{runs[0]}"))
    assert ok(http.post("/v1/train", json=body, headers=headers))["id"] == job["id"]
    answer = http.post("/v1/train", json=body | {"retrain": True}, headers=headers)
    assert answer.status_code == 409, answer.text
    answer = http.post("/v1/train", json=body, headers={"Idempotency-Key": new_id("k")})
    assert answer.status_code == 404, answer.text
