"""From the end of an optimizer step to the first token of the new weights, on the real vLLM.

Ours: the whole server. The clock starts when the learner's process has written the new adapter,
and stops when a caller, who asks the policy by its bare name all the while, has got a token that
the new version said. In between lie publishing (hashes, fsync), vLLM's load, two probes, the job's
transaction and the change of the route; vLLM goes on answering.

ART's order, of openpipe-art 0.5.18 where sampler and learner share a GPU (`unsloth/service.py`,
``_train_shared``): vLLM sleeps during the step; when the adapter is written come a pause of half a
second, ``/wake_up``, and ``/v1/load_lora_adapter`` in place; then the first token. Here the same
requests go to the same vLLM with nothing of ART around it, so that freeing the GPU, which costs it
more, is left out in its favour.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from langchain_art.local_server import LocalServer
from langchain_art_server.backends.model_loading import load_outline
from langchain_art_server.backends.vllm_adapters import Shelf
from langchain_art_server.backends.vllm_process import VllmProcess
from langchain_art_server.config import Settings
from tests.vllm_engine import engine, engine_toml, wide_model

SWAPS, RUNS, PAUSE = 20, 8, 0.5
POLICY = "swapped"
ASKED = {"messages": [{"role": "user", "content": "When is the audit?"}], "max_tokens": 1}


class AwakeVllm(VllmProcess):
    """vLLM with the routes for sleeping."""

    def _environment(self) -> dict[str, str]:
        return super()._environment() | {"VLLM_SERVER_DEV_MODE": "1"}


async def new_job(http: httpx.AsyncClient, step: int) -> str:
    """Queue a step on a few rewarded calls; returns the job's id."""
    ids = [f"{step}-{seed}" for seed in range(RUNS)]
    calls = [
        http.post(
            "/v1/chat/completions",
            json=ASKED | {"model": POLICY, "max_tokens": 8, "art": {"trajectory_id": one}},
        )
        for one in ids
    ]
    await asyncio.gather(*calls)
    for seed, one in enumerate(ids):
        await http.put(f"/v1/trajectories/{one}/reward", json={"reward": float(seed % 2)})
    job = await http.post(
        "/v1/train",
        json={"policy": POLICY, "groups": [ids], "config": {"learning_rate": 1e-3}},
        headers={"Idempotency-Key": f"step-{step}"},
    )
    return job.raise_for_status().json()["id"]


async def ours(base: str, adapters: Path) -> list[float]:
    """Seconds of each swap."""
    seconds: list[float] = []
    async with httpx.AsyncClient(base_url=base, timeout=300) as http:
        for step in range(1, SWAPS + 1):
            job = await new_job(http, step)
            while True:
                answer = await http.post("/v1/chat/completions", json=ASKED | {"model": POLICY})
                heard = time.time()
                if answer.raise_for_status().json()["model"] == f"{POLICY}@{step}":
                    break
            files = (adapters / str(step)).glob("*.safetensors")
            seconds.append(heard - max(file.stat().st_mtime for file in files))
            state = (await http.get(f"/v1/jobs/{job}", params={"wait": 30})).json()["state"]
            assert state == "succeeded", state
    return seconds


async def arts(model: Path, folder: Path, adapters: Path) -> list[float]:
    """Seconds of each swap, in ART's order."""
    settings = Settings.model_validate(
        {"model": str(model), "data_dir": str(folder), "engine": engine()}
    )
    outline = load_outline(settings)
    shelf = Shelf(outline.model, settings.lora.rank, outline.info.dtype)
    process = AwakeVllm(settings, outline.info, shelf.folder, shelf.targets, shelf.max_rank)
    await process.start()
    await process.ready()
    transport = httpx.AsyncHTTPTransport(uds=str(shelf.folder / "vllm.sock"))
    seconds: list[float] = []
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=300) as http:

        async def post(path: str, body: dict[str, Any] | None = None, **query: Any) -> None:
            (await http.post(path, json=body, params=query)).raise_for_status()

        for step in range(1, SWAPS + 1):
            await post("/sleep", level=1, mode="wait")
            checkpoint = folder / f"{step:04d}"
            checkpoint.mkdir()
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copy(adapters / str(step) / name, checkpoint)
            written = time.time()
            await asyncio.sleep(PAUSE)
            await post("/wake_up")
            name, path = f"{POLICY}@{step}", str(checkpoint)
            told = {"lora_name": name, "lora_path": path, "load_inplace": True}
            await post("/v1/load_lora_adapter", told)
            await post("/v1/chat/completions", ASKED | {"model": name})
            seconds.append(time.time() - written)
    process.kill()
    assert process.ended is not None
    await process.ended
    return seconds


def run() -> tuple[dict[str, float], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, toml = wide_model(folder / "model"), folder / "art.toml"
        options = ["--config", str(engine_toml(toml, keep_checkpoints=SWAPS))]
        data = folder / "data"
        with LocalServer(model, policies=[POLICY], data_dir=data, options=options) as server:
            root = server.base_url.removesuffix("/v1")
            mine = asyncio.run(ours(root, data / "adapters" / POLICY))
        theirs = asyncio.run(arts(model, folder / "art", data / "adapters" / POLICY))
    figures = {
        "swap_seconds": statistics.median(mine),
        "swap_seconds_p95": sorted(mine)[int(0.95 * len(mine))],
        "swap_seconds_art": statistics.median(theirs),
        "swap_ratio_art": statistics.median(theirs) / statistics.median(mine),
        "swap_ratio_art_no_pause": (statistics.median(theirs) - PAUSE) / statistics.median(mine),
    }
    return figures, {"swaps": SWAPS, "model": "email base with heads of 32, fp32, vLLM on CPU"}
