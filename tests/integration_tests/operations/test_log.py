"""The log as JSON: whose each record is, and nothing that was said in a prompt or is a key."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from langchain_art import ArtClient
from langchain_art.wire.api_keys import new_api_key
from tests.support.hot_swap import train_once
from tests.support.live_server import ForkedServer
from tests.support.steps_of_a_fit import ended

CHAT = "/v1/chat/completions"
SECRET_WORDS = "xylophone-of-the-quartermaster"
SAY = {"model": "tiny", "messages": [{"role": "user", "content": SECRET_WORDS}], "max_tokens": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedServer]:
    data = tmp_path_factory.mktemp("log") / "data"
    env = {"ART_API_KEY": new_api_key()}
    with ForkedServer(data, "--log-format", "json", "--log-level", "debug", env=env) as one:
        yield one


def records(server: ForkedServer) -> list[dict[str, Any]]:
    lines = server.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def of_request(server: ForkedServer, request_id: str) -> dict[str, Any]:
    """The one record of a request, which is written after its answer."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for one in records(server):
            if one.get("request_id") == request_id and one["logger"].endswith(".requests"):
                return one
        time.sleep(0.02)
    raise AssertionError(f"no record of {request_id}: {server.log.read_text()[-2000:]}")


def test_a_requests_record_says_whose_it_is(server: ForkedServer) -> None:
    with server.http() as http:
        body = SAY | {"art": {"trajectory_id": "run-7"}}
        answer = http.post(CHAT, json=body, headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        seen = of_request(server, "mine-1")
        wanted = {"tenant": "default", "key": "ART_API_KEY", "policy": "tiny", "run_id": "run-7"}
        wanted |= {"call_id": answer.json()["id"], "route": CHAT, "method": "POST"}
        assert seen.items() >= wanted.items() and seen["status"] == 200 and seen["seconds"] > 0
        answer = http.get("/v1/jobs/job-9", headers={"x-request-id": "mine-2"})
        seen = of_request(server, "mine-2")
        assert (seen["job_id"], seen["status"], seen["code"]) == ("job-9", 404, "not_found")


def test_every_answer_gives_an_id_back(server: ForkedServer) -> None:
    with server.http() as http:
        answers = [
            http.get("/healthz"),
            http.get("/metrics"),
            http.get("/nowhere"),
            http.delete("/status"),
            http.post(CHAT, content="{", headers={"Content-Type": "application/json"}),
            http.post(CHAT, json=SAY, headers={"Authorization": "Bearer wrong"}),
            http.get("/page/static/nothing.js"),
        ]
        with http.stream("POST", CHAT, json=SAY | {"stream": True}) as streamed:
            answers.append(streamed)
            streamed.read()
    assert [answer.status_code for answer in answers] == [200, 200, 404, 405, 400, 401, 404, 200]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert all(one.startswith("req-") for one in ids) and len(set(ids)) == len(ids)
    assert of_request(server, ids[-1])["status"] == 200
    # What cannot be parsed has one, too.
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"nonsense\r\n\r\n")
        said = raw.recv(4096)
    assert said.startswith(b"HTTP/1.1 400") and b"\r\nx-request-id: req-" in said


def test_a_jobs_records_say_which_job(server: ForkedServer) -> None:
    with server.http() as http:
        train_once(http, 0)
        for seed in range(2):
            body = SAY | {"seed": seed, "art": {"trajectory_id": f"far-{seed}"}}
            http.post(CHAT, json=body).raise_for_status()
            http.put(f"/v1/trajectories/far-{seed}/reward", json={"reward": seed})
        strict = {"max_logprob_gap": 1e-12}
        job = http.post(
            "/v1/train",
            json={"policy": "tiny", "groups": [["far-0", "far-1"]], "config": strict},
            headers={"Idempotency-Key": "fails", "x-request-id": "train-1"},
        ).json()
        job = ended(http, job)
    assert job["state"] == "failed"
    assert of_request(server, "train-1")["job_id"] == job["id"]
    [said] = [one for one in records(server) if one["level"] == "error"]
    wanted = {"job_id": job["id"], "policy": "tiny", "tenant": "default"}
    assert said.items() >= wanted.items() and "max_logprob_gap" in said["message"]


def test_no_prompt_and_no_key_is_in_the_log(server: ForkedServer) -> None:
    with ArtClient(server.base_url, api_key=server.api_key) as administrator:
        made = administrator.create_key("ana", tenant="ana")
    with server.http(made.key) as http:
        http.post(CHAT, json=SAY)
        http.post(CHAT, json=SAY, headers={"x-request-id": made.key})
        http.get(f"/v1/jobs/{made.key}")
        wrong = SAY | {"messages": [{"role": SECRET_WORDS, "content": SECRET_WORDS}]}
        assert http.post(CHAT, json=wrong).status_code == 400
        http.post("/v1/trajectories", json={"id": "r", "scenario": SECRET_WORDS, "turns": []})
    with server.http() as http:
        answer = http.post(CHAT, json=SAY | {"model": "nobody"})
    of_request(server, answer.headers["x-request-id"])
    said = server.log.read_text()
    assert SECRET_WORDS not in said and made.key not in said and server.api_key not in said
    assert made.id in said
