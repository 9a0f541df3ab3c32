"""The commands of docs/http-training.md train a policy, as they stand and in their order."""

import json
import os
import shutil
import subprocess

import pytest

from langchain_art.client.sync_client import ArtClient
from tests.support.live_server import LiveServer
from tests.support.pages import REPO, blocks

PAGE = REPO / "docs" / "http-training.md"
TOOLS = ("bash", "curl", "jq")


@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}")
def test_the_commands_train_a_policy(art_server: LiveServer) -> None:
    start, *rest = [block.code for block in blocks(PAGE) if block.language == "bash"]
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
    shown = next(block.code for block in blocks(PAGE) if block.language == "text")
    with art_server.http() as http:
        body = {"policy": "p", "groups": [["a"]], "config": {"lr": 1e-3}}
        refused = http.post("/v1/train", json=body, headers={"Idempotency-Key": "shown"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == shown.strip()
