"""What hostile requests do to an innocent client of the same server.

An innocent client asks for 8 tokens, again and again, while each attack of
`benchmarks.hostile.attacks` goes on beside it for `SECONDS`. Its 99th percentile of latency then,
over that of all its calls in the quiet windows before each of them, is the attack's ratio. All is
real: the server with a key, the embedded engine, an attacker in a process of its own at the lowest
priority (on another computer it would take no processor from the server).

In a window there are some hundreds of calls, so a percentile of 99 is the second to tenth slowest
of them, and another program on the computer shows in it. An attacker that does nothing is therefore
measured too, several times in between, as a control: its ratio is the noise of the computer.

``innocent_worst_ratio``: the worst of the attacks. ``control_ratio``: the worst of the controls; a
run where this is far from 1 says little. ``restarts``: how often an engine had to be started again.
``memory_mb``: the most that the gateway's process grew.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.hostile.attacks import ASK, CHAT, CONTROL, attacks
from tests.support.live_server import LiveServer

#: Of an attack, of a quiet window, and from the end of an attack to the next quiet window.
SECONDS, QUIET, SETTLE = 10.0, 4.0, 1.0
#: Attacks between two controls.
CONTROL_EVERY = 8
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
    """The latencies in a quiet window and during an attack."""
    asked = {"port": server.port, "key": KEY, "attack": attack, "seconds": SECONDS + 1}
    argv = [sys.executable, "-m", "benchmarks.hostile"]
    quiet = ask(http, QUIET)
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
    ask(http, SETTLE)  # what the attacker leaves behind is no quiet
    return {
        "attack": attack,
        "quiet": quiet,
        "seen": seen,
        "peak_mb": size,
        "answers": answers,
        "load": os.getloadavg()[0],
    }


def plan(chosen: list[str]) -> list[str]:
    """The attacks, with controls before, in between and after."""
    starts = range(0, len(chosen), CONTROL_EVERY)
    parts = [[CONTROL, *chosen[start : start + CONTROL_EVERY]] for start in starts]
    return [*(name for part in parts for name in part), CONTROL]


def measure(chosen: list[str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures of some attacks, and what was seen during each of them and the controls."""
    with tempfile.TemporaryDirectory() as folder:
        server = LiveServer(Path(folder) / "data", env={"ART_API_KEY": KEY}).start()
        try:
            assert server.process is not None
            with server.http() as http:
                ask(http, QUIET)
                before = peak(server.process.pid)
                found = [beside(server, http, name) for name in plan(chosen)]
                status = http.get("/status").json()
        finally:
            server.stop()
    quiet = p99([took for one in found for took in one.pop("quiet")])
    for one in found:
        seen = one.pop("seen")
        one |= {"p99": p99(seen), "calls": len(seen), "ratio": p99(seen) / quiet}
    figures = {
        "innocent_worst_ratio": max(one["ratio"] for one in found if one["attack"] != CONTROL),
        "control_ratio": max(one["ratio"] for one in found if one["attack"] == CONTROL),
        "restarts": float(status["engine_restarts"]),
        "memory_mb": max(one["peak_mb"] for one in found) - before,
        "quiet_p99_ms": quiet * 1e3,
    }
    return figures, found


def run() -> tuple[dict[str, float], dict[str, Any]]:
    figures, found = measure([name for name in attacks() if name != CONTROL])
    worst = max(found, key=lambda one: one["ratio"])
    return figures, {"worst": worst["attack"], "attacks": found, "seconds": SECONDS}


if __name__ == "__main__":  # python -m benchmarks.innocent PART-OF-A-NAME …: some of the attacks
    names = [name for name in attacks() if any(part in name for part in sys.argv[1:])]
    figures, found = measure(names)
    for one in found:
        print("{ratio:5.2f}  p99 {p99:.3f} s of {calls} calls  {attack}".format(**one))
    print(json.dumps(figures))
