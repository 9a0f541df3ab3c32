"""Steps and rows of the tests that change versions under running calls."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import httpx

from langchain_art_server.algorithms.sequences.training_rows import Row
from tests.support.live_server import LiveServer


def train_once(http: httpx.Client, step: int, policy: str = "tiny") -> None:
    """A step of the policy from version `step` to the next."""
    ids: list[str] = []
    for seed in range(8):
        run = f"swap-{policy}-{step}-{seed}"
        body = {"model": policy, "messages": [{"role": "user", "content": "When?"}], "seed": seed}
        body |= {"max_tokens": 16, "art": {"trajectory_id": run}}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        http.put(f"/v1/trajectories/{run}/reward", json={"reward": float(seed % 2)})
        ids.append(run)
    config = {"learning_rate": 3e-2}  # so large a step that mixed weights would show
    job = http.post(
        "/v1/train",
        json={"policy": policy, "groups": [ids], "config": config},
        headers={"Idempotency-Key": f"swap-{policy}-{step}"},
    ).json()
    while job["state"] not in ("succeeded", "failed"):
        job = http.get(f"/v1/jobs/{job['id']}", params={"wait": 10}).json()
    assert job["result"]["version"] == step + 1, job


def row_of(call: dict[str, Any]) -> Row:
    tokens = call["prompt_token_ids"] + call["token_ids"]
    nothing = [0.0] * len(tokens)
    return Row(tokens, [0] * len(tokens), nothing, nothing, call["temperature"])


def check_versions(server: LiveServer, records: list[dict[str, Any]]) -> set[int]:
    """Each call's logprobs are those of the version that it says, computed by the learner.

    Returns the versions. The server's model is in the folder ``model`` beside its data.
    """
    import torch

    from langchain_art_server.backends.peft.learner_core import LearnerCore

    by_version: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_version[record["version"]].append(record)
    torch.set_num_threads(1)
    core = LearnerCore(str(server.data_dir.parent / "model"))
    for version, calls in by_version.items():
        folder = server.data_dir / "adapters" / server.policy / str(version)
        again = core.logprobs(folder, [row_of(call) for call in calls])
        for call, logprobs in zip(calls, again, strict=True):
            said = len(call["token_ids"])
            gaps = abs(logprobs[-said:] - call["logprobs"])
            assert max(gaps) <= 1e-3 and sum(gaps) / said <= 1e-4, (version, call["id"])
    return set(by_version)
