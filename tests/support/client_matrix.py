"""Clients that are not ours: the programs in `tests/support/clients`, and what each must get."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.environments import litellm_python, node_modules
from tests.support.live_server import REPO, RuleServer

CLIENTS = REPO / "tests" / "support" / "clients"


#: What every client must have got (see tests/support/clients/README.md).
EXPECTED = {
    "tools": ["add", {"a": 2, "b": 3}, "The sum is 5.", True],
    "schema": {"name": "Bob", "age": 7},
    "logprobs": [True, True],
    "n": [[0, "Twice."], [1, "Twice."]],
    "stop": ["one two", "stop"],
    "error": [404, "model_not_found"],
}


def here(script: str) -> Callable[[], tuple[list[str], Path]]:
    return lambda: ([sys.executable, str(CLIENTS / script)], REPO)


def openai_2(script: str) -> Callable[[], tuple[list[str], Path]]:
    return lambda: ([str(litellm_python()), str(CLIENTS / script)], REPO)


def node(script: str) -> Callable[[], tuple[list[str], Path]]:
    def command() -> tuple[list[str], Path]:
        home = node_modules(CLIENTS / "package.json")
        shutil.copy(CLIENTS / script, home)  # modules are looked for beside the program
        return ["node", script], home

    return command


PROGRAMS = {
    "openai-python-3": here("openai_sdk.py"),
    "openai-python-2": openai_2("openai_sdk.py"),
    "chat-openai": here("chat_openai.py"),
    "litellm": openai_2("litellm_client.py"),
    "openai-javascript": node("openai_sdk.mjs"),
    "langgraph-javascript": node("langgraph.mjs"),
    "curl": lambda: (["bash", str(CLIENTS / "curl.sh")], REPO),
}


def check_client(client: str, server: RuleServer) -> None:
    """A client gets what it expects, twice, and the runs of both are captured and trained."""
    prefixes = [f"{client}-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    argv, cwd = PROGRAMS[client]()
    done = subprocess.run(
        [*argv, server.base_url, *prefixes], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()  # litellm prints others, too
    said = [json.loads(line) for line in lines if line.startswith('{"client"')]
    assert [{key: got.get(key) for key in EXPECTED} for got in said] == [EXPECTED, EXPECTED]
    captured(server, prefixes)
    trained(server, prefixes)


def captured(server: RuleServer, prefixes: list[str]) -> None:
    """The runs are there, with what the engine's own journal says of their calls."""
    witness = {line["id"]: line for line in server.witnessed()}
    with server.http() as http:
        for number, prefix in enumerate(prefixes):
            for feature, turns in (("tools", 2), ("schema", 1), ("logprobs", 1), ("n", 2)):
                where = f"/v1/trajectories/{prefix}-{feature}/reward"
                answer = http.put(where, json={"reward": float(number)})
                assert answer.status_code == 200, answer.text
                run = answer.json()
                assert len(run["turns"]) == turns
                assert {turn["node"] for turn in run["turns"]} == {"agent"}
                for turn in run["turns"]:
                    record = http.get(f"/v1/calls/{turn['call_id']}").json()
                    seen = witness[turn["call_id"]]
                    for key in ("prompt_token_ids", "token_ids", "logprobs"):
                        assert record[key] == seen[key]
                if feature == "tools":
                    assert [turn["extends"] for turn in run["turns"]] == [None, 0]
                if feature == "n":
                    assert [turn["excluded_because"] for turn in run["turns"]] == [None, "unchosen"]


def trained(server: RuleServer, prefixes: list[str]) -> None:
    """A step learns each sampled token once, and says what it excluded and why."""
    features = ("tools", "schema", "logprobs", "n")
    groups = [[f"{prefix}-{feature}" for prefix in prefixes] for feature in features]
    with server.http() as http:
        key = {"Idempotency-Key": uuid.uuid4().hex}
        job = http.post("/v1/train", json={"policy": "tiny", "groups": groups}, headers=key).json()
        while job["state"] in ("queued", "running"):
            time.sleep(0.1)
            job = http.get(f"/v1/jobs/{job['id']}").json()
    assert job["state"] == "succeeded", job
    result: dict[str, Any] = job["result"]
    ours = [prefix for prefix in prefixes for _ in range(5)]  # tools: 2, schema, logprobs, n: 1
    assert result["metrics"]["calls_trained"] == len(ours)
    assert result["metrics"]["logprob_gap_mean"] < 1e-5
    assert result["excluded"]["calls.superseded_unchosen"] == 2
