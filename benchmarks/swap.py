"""From the end of an optimizer step to the first token of the new weights, on the real vLLM.

Ours: the whole server. The clock starts when the learner's process has written the new adapter,
and stops when a caller, who waited for the job and then asked the policy by its bare name, has got
a token that the new version said. In between lie vLLM's load, the question whether the step had an
effect, publishing (hashes, fsync), the job's transaction and the change of the route; vLLM goes on
answering.

ART's order, of openpipe-art 0.5.23 where sampler and learner share a GPU (`unsloth/service.py`,
``_train_shared`` and what it calls): vLLM sleeps during the step; when the adapter is written come
six garbage collections of a process that has torch, transformers and PEFT loaded, a pause of half
a second, ``/wake_up``, and ``/v1/load_lora_adapter`` in place, each over a new client; then the
first token. Here the same happens to the same vLLM with nothing else of ART around it: moving the
base model off the GPU, and the packages that ART has loaded besides, are left out in its favour.
`bare_over_ours` is what would be left without collections and pause, over ours: a bare vLLM that
wakes, loads and answers, with no check, no hash and nothing written down.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import peft  # for the size of what is collected  # noqa: F401

from langchain_art import LocalServer
from langchain_art_server.backends.models.loading import load_outline
from langchain_art_server.backends.vllm.adapter_copies import AdapterCopies
from langchain_art_server.backends.vllm.process import VllmProcess
from langchain_art_server.config import Settings
from tests.support.vllm_engine import vllm_table, vllm_toml, wide_model

SWAPS, RUNS = 20, 8
COLLECTIONS, PAUSE = 6, 0.5
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
            state = "queued"
            while state in ("queued", "running"):  # each question ends when there is news
                state = (await http.get(f"/v1/jobs/{job}", params={"wait": 30})).json()["state"]
            assert state == "succeeded", state
            answer = await http.post("/v1/chat/completions", json=ASKED | {"model": POLICY})
            heard = time.time()
            assert answer.raise_for_status().json()["model"] == f"{POLICY}@{step}"
            files = (adapters / str(step)).glob("*.safetensors")
            seconds.append(heard - max(file.stat().st_mtime for file in files))
    return seconds


async def arts(model: Path, folder: Path, adapters: Path) -> tuple[list[float], list[float]]:
    """Seconds of each swap in ART's order, and those of them that went into collections."""
    settings = Settings.model_validate(
        {"model": str(model), "data_dir": str(folder), "sampler": vllm_table()}
    )
    outline = load_outline(settings)
    shelf = AdapterCopies(outline.model, settings.lora.rank, outline.info.dtype)
    process = AwakeVllm(settings, outline.info, shelf.folder, shelf.targets, shelf.max_rank)
    await process.start()
    await process.ready()
    seconds: list[float] = []
    collecting: list[float] = []

    async def post(path: str, body: dict[str, Any] | None = None, **query: Any) -> None:
        transport = httpx.AsyncHTTPTransport(uds=str(shelf.folder / "vllm.sock"))
        async with httpx.AsyncClient(transport=transport, timeout=300) as http:
            (await http.post(f"http://vllm{path}", json=body, params=query)).raise_for_status()

    for step in range(1, SWAPS + 1):
        await post("/sleep", level=1, mode="wait")
        checkpoint = folder / f"{step:04d}"
        checkpoint.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(adapters / str(step) / name, checkpoint)
        written = time.time()
        for _ in range(COLLECTIONS):
            gc.collect()
        collecting.append(time.time() - written)
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
    return seconds, collecting


def run() -> tuple[dict[str, float], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, toml = wide_model(folder / "model"), folder / "art.toml"
        options = ["--config", str(vllm_toml(toml, keep_checkpoints=SWAPS))]
        data = folder / "data"
        with LocalServer(model, policies=[POLICY], data_dir=data, options=options) as server:
            root = server.base_url.removesuffix("/v1")
            mine = asyncio.run(ours(root, data / "adapters" / POLICY))
        theirs, collecting = asyncio.run(arts(model, folder / "art", data / "adapters" / POLICY))
    figures = {
        "swap_seconds": statistics.median(mine),
        "swap_seconds_p95": sorted(mine)[int(0.95 * len(mine))],
        "swap_seconds_art": statistics.median(theirs),
        "swap_ratio_art": statistics.median(theirs) / statistics.median(mine),
        "art_collecting_seconds": statistics.median(collecting),
        "bare_over_ours": statistics.median(
            whole - part - PAUSE for whole, part in zip(theirs, collecting, strict=True)
        )
        / statistics.median(mine),
    }
    return figures, {"swaps": SWAPS, "model": "email base with heads of 32, fp32, vLLM on CPU"}
