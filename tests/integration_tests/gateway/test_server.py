"""The server over HTTP, as any client meets it: dialect, records, training, refusals."""

import io
import json
import math
import subprocess
import tarfile
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.hot_swap import train_once
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id, rewarded, trained
from tests.support.stub_engines import StubServer

SAY: list[Any] = [{"role": "user", "content": "When is the falcon review?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the inbox.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}


def chat(http: httpx.Client, **body: Any) -> httpx.Response:
    base = {"model": "tiny", "messages": SAY, "max_tokens": 12}
    return http.post("/v1/chat/completions", json=base | body)


def sampled_group(http: httpx.Client, rewards: list[float | None]) -> list[str]:
    """Tagged calls, one per run, that become rewarded trajectories over HTTP alone."""
    return [
        rewarded(http, new_id("t"), reward, seed=seed, max_tokens=12)
        for seed, reward in enumerate(rewards)
    ]


def test_a_reply_is_recorded_exactly(http: httpx.Client, sdk: openai.OpenAI) -> None:
    reply = sdk.chat.completions.create(
        model="tiny", messages=SAY, max_tokens=12, logprobs=True, top_logprobs=2, seed=3
    )
    assert reply.model.startswith("tiny@")
    call = http.get(f"/v1/calls/{reply.id}").json()
    assert reply.usage is not None
    assert len(call["token_ids"]) == len(call["logprobs"]) == reply.usage.completion_tokens
    assert len(call["prompt_token_ids"]) == reply.usage.prompt_tokens
    assert call["trainable"] and call["model"] == reply.model
    content = reply.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert [t.logprob for t in content] == call["logprobs"]
    assert all(t.logprob <= 0 and len(t.top_logprobs) == 2 for t in content)


def test_n_choices_are_n_records(http: httpx.Client, sdk: openai.OpenAI) -> None:
    reply = sdk.chat.completions.create(model="tiny", messages=SAY, max_tokens=12, n=3, seed=5)
    assert [c.index for c in reply.choices] == [0, 1, 2]
    ids = [reply.id, f"{reply.id}:1", f"{reply.id}:2"]
    records = [http.get(f"/v1/calls/{one}").json() for one in ids]
    assert len({tuple(r["token_ids"]) for r in records}) > 1


def test_what_cannot_be_trained_says_why(http: httpx.Client) -> None:
    forced = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 64}
    for body, reason in [
        ({"temperature": 0}, "greedy decoding: temperature=0"),
        (forced | {"temperature": 0}, "greedy decoding: temperature=0"),
        ({"top_p": 0.9}, None),
        ({"top_k": 5}, None),
        (forced, None),
    ]:
        answer = chat(http, **body)
        assert answer.status_code == 200, answer.text
        call = http.get(f"/v1/calls/{answer.json()['id']}").json()
        assert (call["trainable"], call["excluded_because"]) == (reason is None, reason)
        assert call["restricted"] == (reason is None)  # at temperature 0 nothing is drawn


def test_models_are_listed_while_policies_are_made(
    art_server: LiveServer, http: httpx.Client
) -> None:
    seen, ended = list[int](), threading.Event()

    def watch() -> None:
        with art_server.http() as other:
            while not ended.is_set():
                seen.append(other.get("/v1/models").status_code)

    watching = threading.Thread(target=watch)
    watching.start()
    for number in range(20):
        http.post("/v1/policies", json={"name": f"listed-{number}"}).raise_for_status()
    ended.set()
    watching.join()
    assert set(seen) == {200}


def test_a_model_whose_name_has_a_slash_is_found(tmp_path: Path) -> None:
    with StubServer(tmp_path / "data", "--served-model-name", "org/base") as server:
        sdk = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
        assert {"org/base", "tiny", "tiny@0"} <= {model.id for model in sdk.models.list()}
        assert sdk.models.retrieve("org/base").id == "org/base"
        with pytest.raises(openai.NotFoundError) as caught:
            sdk.models.retrieve("org/other")
        assert caught.value.code == "model_not_found"
        with server.http() as http:
            for path in ("org/base", "org%2Fbase", "tiny"):  # as the SDK writes it, and others
                assert http.get(f"/v1/models/{path}").json()["id"] == path.replace("%2F", "/")
            for path in ("/v1/models/", "/v1/models/tiny/"):
                there = http.get(path).headers["location"]
                assert there == f"{server.root}{path.rstrip('/')}"


def test_what_is_excluded_is_counted_and_nothing_is_trained(http: httpx.Client) -> None:
    flat = sampled_group(http, [1.0, 1.0])
    single = sampled_group(http, [1.0])
    unscored = sampled_group(http, [None, None])
    before = http.get("/v1/policies/tiny").json()["version"]
    job = trained(http, [flat, single, unscored])
    assert job["state"] == "succeeded"
    assert job["result"]["version"] == before
    assert job["result"]["excluded"] == {
        "groups.zero_variance": 1,
        "groups.single": 1,
        "groups.empty": 1,
        "runs.unscored": 2,
    }


def test_groups_are_stored_all_or_none_and_once(http: httpx.Client) -> None:
    group = {"id": new_id("g"), "trajectories": [{"id": new_id("t")}, {"id": new_id("t")}]}
    assert http.post("/v1/groups", json=group).json()["stored"] == 2
    assert http.post("/v1/groups", json=group).json()["stored"] == 0
    first = group["trajectories"][0]["id"]  # type: ignore[index]
    clash = {"id": new_id("g"), "trajectories": [{"id": new_id("t")}, {"id": first, "reward": 1}]}
    answer = http.post("/v1/groups", json=clash)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    new = clash["trajectories"][0]["id"]  # type: ignore[index]
    assert http.get(f"/v1/trajectories/{new}").status_code == 404


def test_a_policy_is_made_once_and_equals_the_base(http: httpx.Client) -> None:
    spec = {"name": "fresh", "lora": {"rank": 4}}
    for _ in range(2):
        assert http.post("/v1/policies", json=spec).json()["version"] == 0
    other = http.post("/v1/policies", json={"name": "fresh", "lora": {"rank": 8}})
    assert other.status_code == 409
    base = chat(http, model="base_model", seed=1).json()["id"]
    mine = chat(http, model="fresh", seed=1).json()["id"]
    records = [http.get(f"/v1/calls/{one}").json() for one in (base, mine)]
    assert records[0]["token_ids"] == records[1]["token_ids"]
    for bad in ("../up", "UP", "", "a" * 65, "base_model"):
        assert http.post("/v1/policies", json={"name": bad}).status_code in (400, 409)
    unknown = http.post("/v1/policies", json={"name": "odd", "lora": {"targets": ["nothing"]}})
    assert unknown.status_code == 400 and "q_proj" in unknown.text


def test_a_policy_learns_on_when_its_first_version_is_deleted(http: httpx.Client) -> None:
    """It is the base, from which a step measures by default, and its files need not be there."""
    policy = new_id("first")
    http.post("/v1/policies", json={"name": policy}).raise_for_status()
    train_once(http, 0, policy)
    http.delete(f"/v1/policies/{policy}/checkpoints/0").raise_for_status()
    train_once(http, 1, policy)
    http.delete(f"/v1/policies/{policy}").raise_for_status()


def test_checkpoints_are_listed_pinned_rolled_back_and_deleted(
    http: httpx.Client, tmp_path: Path
) -> None:
    for _ in range(2):
        runs = sampled_group(http, [0.0, 1.0])
        job = trained(http, [runs])
        name = f"tiny@{job['result']['version']}"
        assert chat(http).json()["model"] == name
        log = http.get(f"/v1/jobs/{job['id']}/events").json()["data"]
        assert f"{name} serves" in [event["message"] for event in log]
    points = http.get("/v1/policies/tiny/checkpoints").json()["data"]
    newest, older = points[-1]["version"], points[-2]["version"]
    assert points[-1]["serving"] and points[-1]["parent"] == older
    assert chat(http, model=f"tiny@{older}").json()["model"] == f"tiny@{older}"
    where = f"/v1/policies/tiny/checkpoints/{older}"
    assert http.put(f"{where}/pin").json()["pinned"]
    assert "unpin first" in http.delete(where).json()["error"]["message"]
    assert not http.delete(f"{where}/pin").json()["pinned"]
    assert (
        http.post("/v1/policies/tiny/rollback", json={"version": older}).json()["version"] == older
    )
    assert chat(http).json()["model"] == f"tiny@{older}"
    assert "roll back first" in http.delete(where).json()["error"]["message"]
    job = trained(http, [sampled_group(http, [0.0, 1.0])])
    assert job["result"]["version"] == newest + 1  # a number is used once
    assert job["base_version"] == older
    assert http.delete(f"/v1/policies/tiny/checkpoints/{newest}").status_code == 200
    assert http.delete(f"/v1/policies/tiny/checkpoints/{newest}").status_code == 404
    archive = http.get(f"/v1/policies/tiny/checkpoints/{newest + 1}/adapter").content
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(tmp_path, filter="data")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["version"] == newest + 1 and math.isfinite(manifest["metrics"]["loss"])


@pytest.mark.slow
def test_a_full_disk_makes_no_policy_until_there_is_space(
    http: httpx.Client, art_server: LiveServer
) -> None:
    staging = art_server.data_dir / "adapters" / ".staging"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(staging)])
    if mounted.returncode:
        pytest.skip("may not mount a small disk here")
    try:
        full = http.post("/v1/policies", json={"name": "on-a-full-disk"})
    finally:
        subprocess.run(["umount", str(staging)], check=True)
    assert (full.status_code, full.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "Free disk space" in full.text and "retry-after" in full.headers
    assert http.post("/v1/policies", json={"name": "on-a-full-disk"}).status_code == 200


class LossyRoad(httpx.HTTPTransport):
    """Lets each request through, and breaks the connection on the way back, so many times."""

    def __init__(self, losses: int) -> None:
        super().__init__()
        self.losses = losses

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if self.losses:
            self.losses -= 1
            response.read()  # the server answered; the client never hears it
            raise httpx.ReadError("connection reset by peer", request=request)
        return response


def client_of(server: LiveServer, losses: int = 0) -> openai.OpenAI:
    client = httpx.Client(transport=LossyRoad(losses))
    return openai.OpenAI(
        base_url=server.base_url, api_key="none", max_retries=4, http_client=client
    )


def ask(client: openai.OpenAI, run: str, messages: list[Any] = SAY, **more: Any) -> Any:
    tags = {"trajectory_id": run, **more.pop("art", {})}
    return client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, extra_body={"art": tags}, **more
    )


def goes_on(reply: Any, choice: int = 0) -> list[Any]:
    text = reply.choices[choice].message.content or ""
    return [*SAY, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]


def put(http: httpx.Client, run: str, reward: float = 1.0) -> dict[str, Any]:
    answer = http.put(f"/v1/trajectories/{run}/reward", json={"reward": reward})
    assert answer.status_code == 200, answer.text
    return answer.json()


def turns(trajectory: dict[str, Any]) -> list[tuple[str, str | None, int | None]]:
    return [(t["call_id"], t["excluded_because"], t["extends"]) for t in trajectory["turns"]]


def excluded(http: httpx.Client, run: str) -> list[str | None]:
    told = http.get(f"/v1/trajectories/{run}/audit").json()
    return [turn["excluded_because"] for turn in told["turns"]]


def test_a_reply_that_was_lost_on_the_way_is_not_trained(
    http: httpx.Client, art_server: LiveServer
) -> None:
    client, run = client_of(art_server, losses=2), new_id("t")
    got = ask(client, run, seed=7)  # so that all tries say the same
    then = ask(client, run, goes_on(got), seed=7)
    found = turns(put(http, run))
    assert [why for _, why, _ in found] == ["retried", "retried", None, None]
    assert found[2:] == [(got.id, None, None), (then.id, None, 2)]
    tries = [http.get(f"/v1/calls/{one}").json()["retry"] for one, _, _ in found]
    assert tries == [0, 1, 2, 0]
    assert excluded(http, run) == ["superseded_retried", "superseded_retried", None, None]


def test_a_part_whose_text_is_none_is_refused_and_the_run_can_be_rewarded(
    http: httpx.Client, art_server: LiveServer
) -> None:
    run = new_id("t")
    ask(client_of(art_server), run)
    for text in (5, None, ["a"], {"a": 1}):
        content = [{"type": "text", "text": "When"}, {"type": "text", "text": text}]
        body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        answer = http.post("/v1/chat/completions", json=body | {"art": {"trajectory_id": run}})
        assert answer.status_code == 400, answer.text
        said = answer.json()["error"]["message"]
        assert f"messages[0].content[1].text: got {text!r}, expected a string" in said
    assert len(turns(put(http, run))) == 1


def test_calls_join_a_run_until_a_job_has_it(http: httpx.Client, art_server: LiveServer) -> None:
    client, run, other = client_of(art_server), new_id("t"), new_id("t")
    first = ask(client, run, seed=1)
    answer = http.put(
        f"/v1/trajectories/{run}/reward",
        json={"reward": 0.0, "scenario": "s", "status": "failed", "scores": {"a": 1.0}},
    )
    assert len(answer.json()["turns"]) == 1
    second = ask(client, run, goes_on(first), seed=2)
    whole = put(http, run, 1.0)
    assert turns(whole) == [(first.id, None, None), (second.id, None, 0)]
    assert (whole["reward"], whole["scenario"], whole["status"]) == (1.0, "s", "failed")
    assert whole["scores"] == {"a": 1.0}
    assert put(http, run, 1.0) == whole == http.get(f"/v1/trajectories/{run}").json()
    ask(client, other, seed=3)
    put(http, other, 0.0)
    job = trained(http, [[run, other]])
    assert job["result"]["metrics"]["calls_trained"] == 3
    assert put(http, run, 1.0) == whole  # nothing new: as often as one likes
    ask(client, run, seed=4)
    late = http.put(f"/v1/trajectories/{run}/reward", json={"reward": 1.0})
    assert (late.status_code, late.json()["error"]["code"]) == (409, "conflict")
    said = late.json()["error"]["message"]
    assert "1 calls were tagged" in said and job["id"] in said and "an id of their own" in said
    assert http.get(f"/v1/trajectories/{run}").json() == whole


def test_a_run_that_was_sent_whole_is_not_assembled(
    http: httpx.Client, art_server: LiveServer
) -> None:
    client, run = client_of(art_server), new_id("t")
    reply = ask(client, run)
    ask(client, run)
    sent = {"id": run, "turns": [{"call_id": reply.id, "node": "writer"}]}
    assert http.post("/v1/trajectories", json=sent).json()["stored"]
    assert turns(put(http, run)) == [(reply.id, None, None)]
