"""What hostile requests do to an innocent client of the same server.

An innocent client asks for 8 tokens, again and again, while each attack of
`benchmarks.hostile.attacks` goes on beside it for `SECONDS`. Its 99th percentile of latency then,
over that of the quiet windows before and after, is the attack's ratio. All is real: the server
with a key, the embedded engine, an attacker in a process of its own at the lowest priority (on
another computer it would take no processor from the server).

``innocent_worst_ratio``: the worst of the attacks. ``restarts``: how often an engine had to be
started again. ``memory_mb``: the most that the gateway's process grew.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.hostile.attacks import ASK, CHAT, attacks
from tests.support.live_server import LiveServer

SECONDS, QUIET = 6.0, 4.0
KEY = secrets.token_urlsafe(32)


def ask(http: httpx.Client, seconds: float) -> list[float]:
    """Latencies in seconds of one call after the other, for so long; one refused is infinite."""
    seen: list[float] = []
    until = time.monotonic() + seconds
    body = {"model": "base_model", "messages": ASK, "max_tokens": 8}
    while time.monotonic() < until:
        begun = time.monotonic()
        answer = http.post(CHAT, json=body | {"seed": len(seen)})
        took = time.monotonic() - begun
        seen.append(took if answer.status_code == 200 else float("inf"))
    return seen


def p99(seen: list[float]) -> float:
    return sorted(seen)[min(len(seen) - 1, int(len(seen) * 0.99))]


def peak(pid: int) -> float:
    """The most resident memory that a process has had, in megabytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def beside(server: LiveServer, http: httpx.Client, attack: str) -> dict[str, Any]:
    asked = {"port": server.port, "key": KEY, "attack": attack, "seconds": SECONDS + 1}
    argv = [sys.executable, "-m", "benchmarks.hostile"]
    quiet = p99(ask(http, QUIET))
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as attacker:
        assert attacker.stdin and attacker.stdout and server.process
        attacker.stdin.write(json.dumps(asked))
        attacker.stdin.close()
        attacker.stdout.readline()
        seen = ask(http, SECONDS)
        size = peak(server.process.pid)
        answers = json.loads(attacker.stdout.readline())
    return {
        "quiet": quiet,
        "p99": p99(seen),
        "calls": len(seen),
        "peak_mb": size,
        "answers": answers,
    }


def run() -> tuple[dict[str, float], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        server = LiveServer(Path(folder) / "data", env={"ART_API_KEY": KEY}).start()
        try:
            assert server.process is not None
            with server.http() as http:
                ask(http, QUIET)
                before = peak(server.process.pid)
                found = {name: beside(server, http, name) for name in attacks()}
                status = http.get("/status").json()
        finally:
            server.stop()
    quiet = statistics.median(one["quiet"] for one in found.values())
    for one in found.values():
        one["ratio"] = one["p99"] / quiet
    worst = max(found, key=lambda name: found[name]["ratio"])
    figures = {
        "innocent_worst_ratio": found[worst]["ratio"],
        "restarts": float(status["engine_restarts"]),
        "memory_mb": max(one["peak_mb"] for one in found.values()) - before,
        "quiet_p99_ms": quiet * 1e3,
    }
    return figures, {"worst": worst, "attacks": found, "seconds": SECONDS}
