"""Steps and rows of the tests that change versions under running calls."""

from __future__ import annotations

from typing import Any

import httpx

from langchain_art_server.algorithms.sequences.training_rows import Row


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
