"""Calls and jobs of a fleet of two servers, and how long the servers take to know of them."""

import time
from typing import Any

from tests.support import steps_of_a_fit
from tests.support.gateways import Gateway, Gateways

QUESTION = [{"role": "user", "content": "When is the audit?"}]
#: Seconds within which each server routes to what was published.
SOON = 1.0


def said(gateway: Gateway, policy: str, **more: Any) -> Any:
    """A call, and what answered it."""
    body = {"model": policy, "messages": QUESTION, "max_tokens": 4} | more
    with gateway.http() as http:
        return http.post("/v1/chat/completions", json=body)


def routes_to(gateway: Gateway, policy: str, model: str) -> None:
    """Wait until a server routes a policy's name to `model`: calls that are sent `SOON` from now.

    However long such a call takes: it waits until the server knows what to answer with.
    """
    soon, until, found = time.monotonic() + SOON, time.monotonic() + 60, None
    while found != model:
        sent = time.monotonic()
        assert sent < until, found
        found = said(gateway, policy).json().get("model")
        assert sent < soon or found in (None, model), f"{found} is stale"


def make_runs(gateways: list[Gateway], policy: str, name: str) -> list[str]:
    """Four runs with rewards, whose calls go to the servers in turn."""
    runs = [f"{policy}-{name}-{seed}" for seed in range(4)]
    for seed, run in enumerate(runs):
        gateway = gateways[seed % len(gateways)]
        answer = said(gateway, policy, seed=seed, max_tokens=8, art={"trajectory_id": run})
        assert answer.status_code == 200, answer.text
        with gateways[(seed + 1) % len(gateways)].http() as http:
            reward = {"reward": float(seed % 2)}
            http.put(f"/v1/trajectories/{run}/reward", json=reward).raise_for_status()
    return runs


def order(gateway: Gateway, policy: str, runs: list[str], key: str) -> Any:
    body = {"policy": policy, "groups": [runs], "config": {"learning_rate": 1e-3}}
    with gateway.http() as http:
        answer = http.post("/v1/train", json=body, headers={"Idempotency-Key": key})
        return answer.raise_for_status().json()


def ended(gateway: Gateway, job: Any) -> Any:
    with gateway.http() as http:
        return steps_of_a_fit.ended(http, job)


def make_policy(fleet: Gateways, name: str) -> str:
    with fleet.all[0].http() as http:
        http.post("/v1/policies", json={"name": name}).raise_for_status()
    return name


def stopped(fleet: Gateways) -> tuple[Gateway, Gateway]:
    """The server that has stopped itself, and the other one."""
    until = time.monotonic() + 60
    while True:
        for one, other in (fleet.all, fleet.all[::-1]):
            if one.is_stopped and not fleet.stop_file.exists():
                return one, other
        assert time.monotonic() < until, "no server came to it"
        time.sleep(0.01)
