"""Clients that are not ours: the programs in `tests/support/clients`, and what each must get."""

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support import steps_of_a_fit
from tests.support.environments import litellm_proxy_python, litellm_python, node_modules
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
#: Feature -> calls of its run.
TURNS = {"tools": 2, "schema": 1, "logprobs": 1, "n": 2}


def python(script: str, program: Callable[[], Path]) -> Callable[[], tuple[list[str], Path]]:
    return lambda: ([str(program()), str(CLIENTS / script)], REPO)


def here(script: str) -> Callable[[], tuple[list[str], Path]]:
    return python(script, lambda: Path(sys.executable))


def node(script: str) -> Callable[[], tuple[list[str], Path]]:
    def command() -> tuple[list[str], Path]:
        home = node_modules(CLIENTS / "package.json")
        shutil.copy(CLIENTS / script, home)  # modules are looked for beside the program
        return ["node", script], home

    return command


PROGRAMS = {
    "openai-python-3": here("openai_sdk.py"),
    "openai-python-2": python("openai_sdk.py", litellm_python),
    "chat-openai": here("chat_openai.py"),
    "litellm": python("litellm_client.py", litellm_python),
    "openai-javascript": node("openai_sdk.mjs"),
    "langgraph-javascript": node("langgraph.mjs"),
}
#: Too heavy to install for more than `make soak`.
PROXY = {"litellm-proxy": python("litellm_proxy.py", litellm_proxy_python)}


def check_client(client: str, server: RuleServer) -> None:
    """A client gets what it expects, twice, and the runs of both are captured and trained."""
    prefixes = two_prefixes(client)
    argv, cwd = (PROGRAMS | PROXY)[client]()
    said = answers([*argv, server.base_url, *prefixes], cwd)
    assert [{key: got.get(key) for key in EXPECTED} for got in said] == [EXPECTED, EXPECTED]
    captured(server, prefixes)
    result = trained(server, prefixes, tuple(TURNS))
    assert result["metrics"]["calls_trained"] == 2 * 5  # of the two choices (n), one
    assert result["excluded"]["calls.superseded_unchosen"] == 2


def two_prefixes(client: str) -> list[str]:
    """Of the runs of two goes, so that they can be compared."""
    return [f"{client}-{uuid.uuid4().hex[:8]}" for _ in range(2)]


def answers(
    argv: list[str], cwd: Path, env: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The JSON lines that a program prints; `env`: its environment, None: this process's."""
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()  # litellm prints others, too
    return [json.loads(line) for line in lines if line.startswith('{"client"')]


def captured(server: RuleServer, prefixes: list[str]) -> None:
    """The runs are there, with what the engine's own journal says of their calls."""
    witness = {line["id"]: line for line in server.witnessed()}
    with server.http() as http:
        for number, prefix in enumerate(prefixes):
            for feature, count in TURNS.items():
                turns = exact_turns(http, f"{prefix}-{feature}", float(number), witness)
                assert len(turns) == count
                if feature == "tools":
                    assert [turn["extends"] for turn in turns] == [None, 0]
                if feature == "n":
                    assert [turn["excluded_because"] for turn in turns] == [None, "unchosen"]


def exact_turns(
    http: httpx.Client, run: str, reward: float, witness: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The turns of a tagged run, which it rewards; each is as the engine's journal has it."""
    answer = http.put(f"/v1/trajectories/{run}/reward", json={"reward": reward})
    assert answer.status_code == 200, answer.text
    turns: list[dict[str, Any]] = answer.json()["turns"]
    assert {turn["node"] for turn in turns} == {"agent"}
    for turn in turns:
        record = http.get(f"/v1/calls/{turn['call_id']}").json()
        seen = witness[turn["call_id"]]
        for key in ("prompt_token_ids", "token_ids", "logprobs"):
            assert record[key] == seen[key]
    return turns


def trained(server: RuleServer, prefixes: Sequence[str], features: Sequence[str]) -> dict[str, Any]:
    """What a step came to that learned from the runs of all prefixes, grouped by feature."""
    groups = [[f"{prefix}-{feature}" for prefix in prefixes] for feature in features]
    with server.http() as http:
        job = steps_of_a_fit.trained(http, groups)
    assert job["state"] == "succeeded", job
    result: dict[str, Any] = job["result"]
    assert result["metrics"]["logprob_gap_mean"] < 1e-5
    return result
