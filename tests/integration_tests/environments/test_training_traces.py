"""Runs are exported as OpenEnv's training traces, and what OpenEnv captured is imported.

OpenEnv itself reads and writes them in the process of its fit: `test_fits`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from langchain_art import ArtClient, capture
from langchain_art.cli.main import app
from langchain_art.errors import ConfigError
from langchain_art.traces.training_traces import training_trace
from langchain_art.wire import Trajectory, Turn
from tests.support.chat_models import model_of
from tests.support.graphs import ASK, graph_of, node
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id

#: Reads each line of a file with OpenEnv's model; then adds a trace of OpenEnv's own capture.
OPENENV = """
import json
from openenv.core.harness.capture.contract import to_training_trace
from openenv.core.harness.capture.export import export_session
from openenv.core.harness.capture.graph import TurnNode
from openenv.core.harness.capture.sessions import Session
from openenv.core.harness.training import TrainingTrace
for line in open("runs.jsonl"):
    assert TrainingTrace.model_validate_json(line).model_dump() == json.loads(line)
session = Session("s-1")
asked, said = {"role": "user", "content": "When?"}, {"role": "assistant", "content": "In May."}
for number, messages in enumerate([[asked], [asked, said, asked]]):
    session.graph.add_turn(TurnNode(
        node_id=f"n-{number}", index=number, model="qwen", request_messages=messages,
        prompt_ids=[1, 2, 3, 4, 5, 6][: 2 + 4 * number], sampled_ids=[3, 4],
        sampled_logprobs=[-0.5, -0.25], response_message=said, finish_reason="stop",
    ))
captured = to_training_trace(session.graph, export_session(session))
beside = [*beside, captured.model_dump(mode="json")]
"""


def played(server: LiveServer, policy: str) -> str:
    """The id of a run of three calls, the second of which is greedy."""
    writer = model_of(server, policy, max_tokens=5)
    critic = model_of(server, policy, max_tokens=5, temperature=0.0)
    graph = graph_of(writer=node(writer), critic=node(critic), last=node(writer)).compile()
    with capture(scenario="mails") as run:
        graph.invoke(ASK)
        run.reward = 0.75
    with ArtClient(server.base_url) as client:
        client.post_trajectory(run.trajectory())
    return run.id


def exported(server: LiveServer, file: Path) -> str:
    """The id of a run in a file, which has the exact tokens that the server recorded."""
    policy = new_id("traces")
    with ArtClient(server.base_url) as client:
        client.create_policy(policy)
        run = played(server, policy)
        app(["traces", "export", run, "--out", str(file)], standalone_mode=False)
        [trace] = [json.loads(line) for line in file.read_text().splitlines()]
        for turn in trace["turns"]:
            record = client.call(turn["node_id"])
            assert turn["prompt_token_ids"] == record["prompt_token_ids"]
            assert turn["completion_token_ids"] == record["token_ids"]
            assert turn["per_token_logps"] == pytest.approx(record["logprobs"], abs=1e-6)
            assert max(turn["per_token_logps"]) <= 0, "OpenEnv takes no other"
            sampled = int(turn["metadata"]["node"] != "critic")
            mask = [0] * len(record["prompt_token_ids"]) + [sampled] * len(record["token_ids"])
            assert turn["loss_mask"] == mask
        assert client.audit(run).trained_tokens == sum(sum(t["loss_mask"]) for t in trace["turns"])
    about = [turn["metadata"] for turn in trace["turns"]]
    assert [one["node"] for one in about] == ["writer", "critic", "last"]
    assert [one["excluded_because"] is None for one in about] == [True, False, True]
    ids = [turn["node_id"] for turn in trace["turns"]]
    assert [one["extends"] for one in about] == [None, *ids[:2]]
    whose = {(one["run"], one["scenario"], one["run_reward"]) for one in about}
    assert whose == {(run, "mails", 0.75)}
    return run


def check_import(run: str, file: Path, foreign: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Import the file of `exported` with OpenEnv's own trace in it."""
    [trace] = [json.loads(line) for line in file.read_text().splitlines()]
    both = [trace | {"score": 1.0}, foreign | {"score": 1.0, "scenario": "may"}]
    file.write_text("".join(json.dumps(one) + "\n" for one in both))
    folder = file.with_name("imported")
    app(["traces", "import", str(file), "--out", str(folder), "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out.partition("training traces")[2].strip())
    assert [found[kind] for kind in ("exact", "foreign", "unreadable")] == [1, 1, 0]
    assert json.loads((folder / "runs.jsonl").read_text()) == run
    assert json.loads((folder / "scenarios.jsonl").read_text())["id"] == "may"
    [line] = (folder / "conversations.jsonl").read_text().splitlines()
    assert [one["content"] for one in json.loads(line)["messages"]] == ["When?", "In May."] * 2


def test_a_run_without_our_calls_is_refused(art_server: LiveServer) -> None:
    foreign = Turn(messages=({"role": "user", "content": "x"},), ours=False)
    run = Trajectory(id=new_id("foreign"), turns=(foreign,), reward=1.0)
    with ArtClient(art_server.base_url) as client:
        client.post_trajectory(run)
        with pytest.raises(ConfigError, match="none of whose calls"):
            training_trace(client, run.id)
