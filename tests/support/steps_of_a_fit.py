"""Steps of training on a real server, as a fit sends them: tagged calls, rewards, a job."""

import uuid
from typing import Any

import httpx


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code in (200, 202), answer.text
    return answer.json()


def ended(http: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    """A job once it has ended."""
    while job["state"] in ("queued", "running"):
        job = ok(http.get(f"/v1/jobs/{job['id']}", params={"wait": 10}))
    return job


def trained(
    http: httpx.Client, groups: list[list[str]], policy: str = "tiny", key: str = "", **body: Any
) -> dict[str, Any]:
    """One step on groups of runs; the job when it has ended."""
    order = {"policy": policy, "groups": groups, **body}
    headers = {"Idempotency-Key": key or new_id("k")}
    return ended(http, ok(http.post("/v1/train", json=order, headers=headers)))


def rewarded(http: httpx.Client, run: str, reward: float | None, **asked: Any) -> str:
    """A run with one call and a reward; its id."""
    said = [{"role": "user", "content": "When?"}]
    body = {"model": "tiny", "messages": said, "art": {"trajectory_id": run}}
    ok(http.post("/v1/chat/completions", json=body | asked))
    ok(http.put(f"/v1/trajectories/{run}/reward", json={"reward": reward}))
    return run


def run_of(
    http: httpx.Client, policy: str, reward: float, seed: int, node: str | None = None, **told: Any
) -> str:
    """A run with one call and a reward, and what else is told with it; its id."""
    run = new_id("run")
    body = {
        "model": policy,
        "messages": [{"role": "user", "content": "Hi?"}],
        "max_tokens": 8 + seed,
        "seed": seed,
        "art": {"trajectory_id": run} | ({"node": node} if node else {}),
    }
    ok(http.post("/v1/chat/completions", json=body))
    ok(http.put(f"/v1/trajectories/{run}/reward", json={"reward": reward, **told}))
    return run


def evaluate(
    http: httpx.Client, version: str, rewards: dict[str, float], node: str | None = None
) -> None:
    """A held-out run of each scenario on a version, with this reward, as `Trainer.evaluate`."""
    mark = {"evaluation": version}
    for i, (scenario, reward) in enumerate(rewards.items()):
        run_of(http, version, reward, i, node, scenario=scenario, metadata=mark)


def step(
    http: httpx.Client,
    policy: str,
    fit: str,
    number: int,
    rewards: tuple[float, ...] = (0.0, 1.0),
    node: str | None = None,
    **body: Any,
) -> dict[str, Any]:
    """One step on a group of runs with these rewards; the job when it has ended."""
    runs = [run_of(http, policy, reward, i, node) for i, reward in enumerate(rewards)]
    return trained(http, [runs], policy, f"{fit}:{policy}:step:{number}", **body)
