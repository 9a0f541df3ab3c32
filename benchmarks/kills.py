"""What kill -9 leaves: of a checkpoint that is being saved, and of rollouts that were collected.

``resumed_share``: one script (`killing.loop`) kills a process that saves checkpoint after
checkpoint, at a random moment of a save, and looks at what the next start loads: whole weights of
the last save or the one after, with the optimizer's state of the same save (``whole_share``: the
weights alone). Ours is the learner's own writing and the store's publishing; ART's are its
`save_checkpoint` and `get_last_checkpoint_dir` (openpipe-art, in an environment of its own), with
transformers' trainer in the place of Unsloth's, which needs a GPU.

``kept_share``: of `ROLLOUTS` rollouts that a collector has acknowledged, those that it still has
when it was killed and started again. Ours is the server over an engine that answers at once,
agent-lightning's is its server, both as in `benchmarks.gateway`. What agent-lightning keeps is
asked by `GET /api/rollouts/ID`; it documents its store as one in memory.

The ratio of theirs to ours is what counts: no figure depends on the machine but by the moments.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gateway import AGL, PATH, process
from benchmarks.gateways.exchange import messages
from benchmarks.learning.children import ART, art_python
from tests.support.environments import environment
from tests.support.live_server import REPO, LiveServer, free_port

KILLS, COLLECTOR_KILLS, ROLLOUTS, SEED = 50, 5, 100, 0


def saver(python: str | Path, name: str) -> dict[str, float]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPO}:{REPO / 'server'}"}
    argv = [str(python), str(REPO / "benchmarks" / "killing" / f"child_{name}.py")]
    argv += [str(KILLS), str(SEED)]
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def ours(folder: Path) -> float:
    """Share of the acknowledged rollouts, each a call and its trajectory, that are kept."""
    draw, kept = random.Random(SEED), 0
    for number in range(COLLECTOR_KILLS):
        server = LiveServer(folder / f"ours-{number}", module="benchmarks.gateways.ours").start()
        runs: dict[str, str] = {}
        with server.http() as http:
            for one in range(ROLLOUTS):
                body = {"model": server.policy, "messages": messages(one)}
                call = http.post(PATH, json=body).raise_for_status().json()["id"]
                run = {"id": f"r-{one}", "turns": [{"call_id": call}], "reward": draw.random()}
                http.post("/v1/trajectories", json=run).raise_for_status()
                runs[run["id"]] = call
        server.kill()
        server.start()
        with server.http() as http:
            for run, call in runs.items():
                paths = (f"/v1/trajectories/{run}", f"/v1/calls/{call}")
                kept += all(http.get(path).status_code == 200 for path in paths)
        server.stop()
    return kept / (COLLECTOR_KILLS * ROLLOUTS)


def agent_lightning(folder: Path) -> float:
    """The same of agent-lightning's server: a rollout, and a call in it."""
    upstream, kept = free_port(), 0
    engine = [sys.executable, "-m", "benchmarks.gateways.upstream", str(upstream)]
    python = str(environment("agentlightning", AGL))
    with process(engine, folder, upstream):
        for _ in range(COLLECTOR_KILLS):
            port = free_port()
            argv = [python, "-m", "agentlightning.server", "host=127.0.0.1", f"port={port}"]
            argv += ["default_proxy.model_name=stub"]
            api = f"http://127.0.0.1:{port}/api"
            names = [f"r-{one}" for one in range(ROLLOUTS)]
            with process(argv, folder, port) as pid, httpx.Client(timeout=60) as http:
                endpoint = {"model": "stub", "endpoint": f"http://127.0.0.1:{upstream}/v1"}
                http.post(f"{api}/models", json=[endpoint]).raise_for_status()
                rollouts = [{"input": {}, "rollout_id": name} for name in names]
                http.post(f"{api}/rollouts", json=rollouts).raise_for_status()
                for one, name in enumerate(names):
                    where = f"/proxy/rollout/{name}/attempt/0/mode/train/openai{PATH}"
                    body = {"model": "stub", "messages": messages(one)}
                    http.post(f"http://127.0.0.1:{port}{where}", json=body).raise_for_status()
                    http.get(f"{api}/rollouts/{name}").raise_for_status()
                os.kill(pid, signal.SIGKILL)
            with process(argv, folder, port), httpx.Client(timeout=60) as http:
                kept += sum(http.get(f"{api}/rollouts/{n}").status_code == 200 for n in names)
    return kept / (COLLECTOR_KILLS * ROLLOUTS)


def run() -> tuple[dict[str, float], dict[str, Any]]:
    figures: dict[str, float] = {}
    for name, python in (("ours", sys.executable), ("art", art_python())):
        figures |= {f"{key}_share_{name}": share for key, share in saver(python, name).items()}
    with tempfile.TemporaryDirectory() as name:
        collectors: dict[str, Callable[[Path], float]] = {"ours": ours, "agl": agent_lightning}
        for key, collector in collectors.items():
            figures[f"kept_share_{key}"] = collector(Path(name))
    about = {"kills": KILLS, "collector_kills": COLLECTOR_KILLS, "rollouts": ROLLOUTS, "seed": SEED}
    return figures, about | {"adapter_mb": 14, "packages_of_others": [*ART, *AGL]}
