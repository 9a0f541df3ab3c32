"""Calls of any client, tagged with a run: choices, retries, attempts, late calls, over HTTP."""

import uuid
from typing import Any

import httpx
import openai

from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import trained

ASK: list[Any] = [{"role": "user", "content": "When is the falcon review?"}]


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


def sdk(server: LiveServer, losses: int = 0) -> openai.OpenAI:
    client = httpx.Client(transport=LossyRoad(losses))
    return openai.OpenAI(
        base_url=server.base_url, api_key="none", max_retries=4, http_client=client
    )


def new_run() -> str:
    return f"t-{uuid.uuid4().hex}"


def ask(client: openai.OpenAI, run: str, messages: list[Any] = ASK, **more: Any) -> Any:
    tags = {"trajectory_id": run, **more.pop("art", {})}
    return client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, extra_body={"art": tags}, **more
    )


def goes_on(reply: Any, choice: int = 0) -> list[Any]:
    text = reply.choices[choice].message.content or ""
    return [*ASK, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]


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
    client, run = sdk(art_server, losses=2), new_run()
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
    run = new_run()
    ask(sdk(art_server), run)
    for text in (5, None, ["a"], {"a": 1}):
        content = [{"type": "text", "text": "When"}, {"type": "text", "text": text}]
        body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        answer = http.post("/v1/chat/completions", json=body | {"art": {"trajectory_id": run}})
        assert answer.status_code == 400, answer.text
        said = answer.json()["error"]["message"]
        assert f"messages[0].content[1].text: got {text!r}, expected a string" in said
    assert len(turns(put(http, run))) == 1


def test_calls_join_a_run_until_a_job_has_it(http: httpx.Client, art_server: LiveServer) -> None:
    client, run, other = sdk(art_server), new_run(), new_run()
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
    client, run = sdk(art_server), new_run()
    reply = ask(client, run)
    ask(client, run)
    sent = {"id": run, "turns": [{"call_id": reply.id, "node": "writer"}]}
    assert http.post("/v1/trajectories", json=sent).json()["stored"]
    assert turns(put(http, run)) == [(reply.id, None, None)]
