"""What the page shows of runs is what the server trained, recorded and was told."""

import math
import uuid
from typing import Any

import httpx

from langchain_art.client.sync_client import ArtClient
from langchain_art.wire import Trajectory
from tests.support.live_server import LiveServer
from tests.support.reviewed_runs import MakeRuns, human_reward


def get(http: httpx.Client, path: str, **query: object) -> Any:
    answer = http.get(f"/page/{path}", params={k: str(v) for k, v in query.items()})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_run_its_tokens_and_advantages(
    own_policy: str, make_runs: MakeRuns, client: ArtClient, http: httpx.Client
) -> None:
    policy = own_policy
    runs = make_runs(3)
    for run, reward in zip(runs, (1.0, 0.0, 0.0), strict=True):
        client.reward(run, reward)
    asked: Any = {"policy": policy, "sort": "reward", "descending": "false"}
    named = get(http, "runs", **asked, limit=2)
    rest = get(http, "runs", **asked, after=named["next"])
    listed = [*named["runs"], *rest["runs"]]
    assert [one["id"] for one in listed] == [runs[1].id, runs[2].id, runs[0].id]
    assert listed[2]["asked"] == "Question 0" and listed[2]["nodes"] == ["writer"]
    best = get(http, "runs", policy=policy, reward_min=0.5, score="ruler", score_max=0.0)
    assert [one["id"] for one in best["runs"]] == [runs[0].id]
    assert rest["next"] is None and policy in get(http, "run-names")["policies"]

    job = client.train([[run.id for run in runs]], policy)
    result = client.wait(job)
    assert result.version == 1
    learned = get(http, "runs", policy=policy, step=1)["runs"]
    assert {one["id"] for one in learned} == {run.id for run in runs}
    credit = [get(http, f"runs/{run.id}/credit/{job.id}")["turns"][0] for run in runs]
    tokens = [get(http, f"calls/{run.turns[0].call_id}/tokens") for run in runs]
    counts = [len(one["token_ids"]) for one in tokens]
    found = [one["advantage"] for one in credit]
    assert found[0] > 0 > found[1] == found[2]
    node = result.nodes["writer"]
    for value, given in (
        (node.advantage_mean, found),
        (node.advantage_abs, [abs(one) for one in found]),
    ):
        mean = sum(n * one for n, one in zip(counts, given, strict=True)) / sum(counts)
        assert math.isclose(value, mean, abs_tol=1e-12)
    for run, one in zip(runs, tokens, strict=True):
        record = client.call(run.turns[0].call_id or "")
        assert (one["token_ids"], one["logprobs"]) == (record["token_ids"], record["logprobs"])
        said = (run.turns[0].reply or {})["content"] or ""
        assert "".join(one["texts"]).startswith(said) and len(one["texts"]) == len(one["token_ids"])
    view = get(http, f"runs/{runs[0].id}")
    assert view["audit"] == client.audit(runs[0].id).model_dump(mode="json")
    assert view["run"]["reward"] == 1.0 and view["audit"]["trained_by"] == {policy: job.id}

    nothing = client.train([[runs[0].id]], policy)
    client.wait(nothing)
    refused = http.get(f"/page/runs/{runs[1].id}/credit/{nothing.id}")
    assert refused.status_code == 404 and "had no trajectory" in refused.text


def test_siblings_judges_and_where_they_part(http: httpx.Client) -> None:
    group, scenario = f"g-{uuid.uuid4().hex}", f"s-{uuid.uuid4().hex}"

    def run(name: str, *replies: str) -> dict[str, Any]:
        turns = [
            {"node": "writer", "ours": False, "reply": {"role": "assistant", "content": reply}}
            for reply in replies
        ]
        known = {"id": f"{group}-{name}", "scenario": scenario, "turns": turns}
        judged = {"judged": {"ruler": f"<b>{name}</b>", "gate": None}}
        return known | {"metadata": judged, "scores": {"ruler": 0.5}}

    runs = [run("a", "same", "Dear Ann"), run("b", "same", "Dear Bob"), run("c", "same")]
    posted = http.post("/v1/groups", json={"id": group, "trajectories": runs})
    posted.raise_for_status()
    found = get(http, f"runs/{group}-a/siblings")
    assert [one["summary"]["id"] for one in found["runs"]] == [one["id"] for one in runs]
    assert [one["parts"] for one in found["runs"]] == [
        None,
        {"turn": 1, "characters": 5},
        {"turn": 1, "characters": 0},
    ]
    assert found["runs"][1]["judged"] == {"ruler": "<b>b</b>"}
    assert found["runs"][1]["turns"][1]["reply"] == "Dear Bob"
    for one in runs:
        http.delete(f"/v1/trajectories/{one['id']}").raise_for_status()
    assert http.get(f"/page/runs/{group}-a/siblings").status_code == 404


def test_what_is_to_review_and_what_a_review_will_do(
    art_server: LiveServer, make_runs: MakeRuns, client: ArtClient, http: httpx.Client
) -> None:
    first, second = make_runs(2)

    def foresee(run: Trajectory, **said: Any) -> dict[str, Any]:
        about = {"id": "r", "source": "page", "trajectory": run.id, "reviewer": "ann", "at": 2}
        review = about | {"kind": "reward", "name": "human_reward"} | said
        answer = http.post("/page/review-effect", json=review)
        assert answer.status_code == 200, answer.text
        return answer.json()

    queue = get(http, "review-queue", pick="random")
    assert set(queue["foreseen"]) == {one["id"] for one in queue["runs"]}
    assert set(client.foresee_reviews([first.id, second.id, "lost"]).values()) == {"trains"}
    many = [first.id, *(f"lost-{number}" for number in range(1000)), second.id]
    assert client.foresee_reviews(many).keys() == {first.id, second.id}
    bare = f"bare-{uuid.uuid4().hex}"
    client.post_trajectory(Trajectory(id=bare))
    assert client.foresee_reviews([bare]) == {bare: "other_model"}
    client.delete_trajectory(bare)
    assert foresee(first, value=1.0)["effect"] == "alone"
    assert foresee(first, value=1.0, name="h")["effect"] == "is_kept"
    assert foresee(first, value=None)["effect"] == "taken_back"
    said = human_reward(second, 0.0, reviewer="ann")
    client.put_reviews([said])
    assert client.reviews(run=second) == [said]
    assert get(http, f"runs/{second.id}")["reviews"] == [said.model_dump(mode="json")]
    taught = {"effect": "teaches_reward", "policy": art_server.policy, "revises": None}
    assert foresee(first, value=1.0) == taught
    assert foresee(first, value=0.0)["effect"] == "all_equal"
    assert foresee(second, value=1.0)["revises"] == said.id
    call = second.turns[0].call_id
    for changed in ({"reviewer": "bob"}, {"source": "api"}, {"call_id": call}):
        assert foresee(second, value=1.0, **changed)["revises"] is None
    call, reply = first.turns[0].call_id, first.turns[0].reply or {}
    better = {"role": "assistant", "content": "On 14 March."}
    corrected = {"kind": "correction", "name": "correction", "call_id": call}
    assert foresee(first, **corrected, correction=better)["effect"] == "teaches_preference"
    same = {"role": "assistant", "content": reply["content"]}
    assert foresee(first, **corrected, correction=same)["effect"] == "unchanged"
    wrong = {"id": "r", "source": "page", "trajectory": first.id, "at": 1, "kind": "score"}
    body = wrong | {"name": "h", "value": 1, "call_id": "none"}
    assert http.post("/page/review-effect", json=body).status_code == 404
    after = get(http, "review-queue", pick="random")["runs"]
    assert second.id not in {one["id"] for one in after}


def test_what_no_list_can_be_asked_is_refused_by_name(http: httpx.Client) -> None:
    wrong = "limit=0 limit=201 sort=body after=x policy=UPPER stat=failed reward_min=nan"
    for query in wrong.split():
        answer = http.get(f"/page/runs?{query}")
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == query.partition("=")[0]
