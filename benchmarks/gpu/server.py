"""The whole server on a GPU: ``python -m benchmarks.gpu.server [--model NAME] [--small]``.

For each way to place the engines on one GPU: a server is started, and `langchain-art canary` learns
its toy on it: capture, groups, training steps, hot swaps. It checks that sampler and learner agree,
that the adapter is what is sampled, that tokens are drawn as reported. Two models: that of the
e-mail demo, which must learn, and the shape of a real one, whose random weights need not.

Writes ``out/bench/gpu/server-NAME.json``; ends with status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console

from benchmarks.gpu.learner import OUT, conditions, keep
from benchmarks.gpu.sampler import save
from benchmarks.gpu.shapes import SHAPES
from langchain_art.client.local_server import LocalServer
from langchain_art.diagnostics.canary import run_canary
from langchain_art.errors import ArtError
from tests.support.tiny_models import tokenizer
from tests.support.vllm_engine import wide_model

#: Calls at once, and the most tokens of each, by which the sampler's speed is measured.
CALLS, TOKENS = 128, 256
console = Console()
_VLLM = '[sampler]\nkind = "vllm"\npython = "{python}"\n'
#: Name -> ``server.toml``.
PLACES = {
    "embedded sampler": '[sampler]\nkind = "transformers"\n',
    "vLLM beside the learner": _VLLM,
    "vLLM in turns": f"take_turns = true\n{_VLLM}",
    "vLLM in turns, 4 bits, 8-bit Adam, offloading": (
        f'quantization = "nf4"\ntake_turns = true\n{_VLLM}'
        '[learner]\noptimizer = "adamw_8bit"\noffload_activations = true\n'
    ),
    "vLLM beside Unsloth's learner": f'{_VLLM}[learner]\nkind = "unsloth"\n',
}


def save_model(name: str, folder: Path, device: torch.device) -> None:
    """The demo's model, or a shape with random weights and the tests' small vocabulary."""
    if name == "demo":
        wide_model(folder)
        return
    config, words = SHAPES[name](), tokenizer()
    config.vocab_size, config.eos_token_id = len(words), words.eos_token_id
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    save(config, folder, device, dtype)


@contextmanager
def memory_watched() -> Generator[list[int]]:
    """MiB that the driver says are used on the GPU, twice a second."""
    seen, stop = list[int](), threading.Event()

    def watch() -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not stop.wait(0.5):
            said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            seen.append(int(said.split()[0]))

    thread = threading.Thread(target=watch, daemon=True)
    if torch.cuda.is_available():
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        if thread.is_alive():
            thread.join()


async def tokens_per_second(base_url: str) -> float:
    """Sampled by the base model through the gateway, `CALLS` calls at once."""
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=CALLS)) as http:

        async def one(seed: int) -> int:
            asked = {"model": "model", "max_tokens": TOKENS, "seed": seed}
            asked |= {"messages": [{"role": "user", "content": f"Mail {seed}: when is the audit?"}]}
            said = await http.post(f"{base_url}/chat/completions", json=asked)
            return int(said.raise_for_status().json()["usage"]["completion_tokens"])

        begun = time.perf_counter()
        counts = await asyncio.gather(*(one(seed) for seed in range(CALLS)))
        return sum(counts) / (time.perf_counter() - begun)


def measure(
    place: str, model: Path, folder: Path, python: Path, steps: int, logs: Path
) -> dict[str, Any]:
    """One server, one canary; the outputs of its processes are copied to the folder `logs`."""
    toml = folder / "server.toml"
    toml.write_text(PLACES[place].format(python=python))
    local = LocalServer(model, data_dir=folder / "data", options=["--config", str(toml)])
    begun = time.monotonic()
    with memory_watched() as used:
        try:
            with local as server:
                started = time.monotonic() - begun
                report = run_canary(server.base_url, steps=steps)
                rate = asyncio.run(tokens_per_second(server.base_url))
        except ArtError as error:
            return {"failed": str(error)}
        finally:
            logs.mkdir(parents=True, exist_ok=True)
            for log in [local.log, *(folder / "data").glob("*.log")]:
                shutil.copy(log, logs / log.name)
    found = report.model_dump(mode="json") | {"start_seconds": started}
    found |= {"base_tokens_per_second": rate}
    return found | {"most_used_mib": max(used, default=0)}


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = ["demo", *(n for n in SHAPES if n != "small")]
    asked.add_argument("--model", choices=names, default="demo")
    asked.add_argument("--small", action="store_true", help="the embedded sampler alone, for a CPU")
    asked.add_argument("--places", nargs="+", choices=list(PLACES), default=list(PLACES))
    asked.add_argument("--python", type=Path, default=Path(sys.executable), help="that has vLLM")
    asked.add_argument("--steps", type=int, default=24)
    asked.add_argument("--out", type=Path, default=OUT)
    given = asked.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not given.small:
        asked.error(f"{given.model} needs a GPU; --small proves the script on a CPU")
    places = ["embedded sampler"] if given.small else given.places
    found: dict[str, Any] = {}
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"server-{'small' if given.small else given.model}.json"
    with tempfile.TemporaryDirectory(prefix="art-bench-") as temporary:
        model = Path(temporary, "model")
        save_model(given.model, model, device)
        for number, place in enumerate(places):
            folder = Path(temporary, str(number))
            folder.mkdir()
            logs = given.out / f"server-{given.model}-{number}"
            found[place] = one = measure(place, model, folder, given.python, given.steps, logs)
            about = conditions("server", given.model, device)
            keep(path, about | {"places": found})
            console.print(f"{place}: {one.get('seconds', 'failed')} s")
            for check in one.get("checks", []):
                console.print(check, markup=False, soft_wrap=True)
            if "failed" in one:
                console.print(one["failed"], f"See {logs}.", markup=False, soft_wrap=True)
    must = [
        check["passed"] or (check["name"] == "learns" and given.model != "demo")
        for one in found.values()
        for check in one.get("checks", [{"passed": False, "name": ""}])
    ]
    console.print(path)
    sys.exit(0 if all(must) else 1)


if __name__ == "__main__":
    main()
