"""The loop of the demo, taken apart: what sampling, training and the swap cost.

Three steps of the e-mail agent through the real server, with 128 agents at once. Baseline for
sampling: `transformers`' own batched `generate` with the same model, prompts of the same rollouts,
32 at a time, in one process with one thread (no agent, no HTTP, no durable record in its way).
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from examples.email_search.inbox import MailStore, build
from examples.email_search.train import BASE_MODEL, MAX_TOKENS, POLICY, make_rollout
from langchain_art import AsyncArtClient, ChatART, LocalServer, TrainConfig, gather

STEPS, GROUPS, SIZE = 3, 16, 8


def import_seconds(statement: str) -> float:
    """CPU seconds that a statement adds to a bare interpreter; the least of five."""

    def cpu(code: str) -> float:
        timed = f"import time\n{code}\nprint(time.process_time())"
        done = subprocess.run([sys.executable, "-c", timed], capture_output=True, check=True)
        return float(done.stdout)

    return min(cpu(statement) for _ in range(5)) - min(cpu("pass") for _ in range(5))


async def first_token_of(client: httpx.AsyncClient, version: str) -> float:
    """Seconds until a call to the policy's bare name is answered by `version`."""
    begun = time.monotonic()
    body = {"model": POLICY, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    while True:
        reply = (await client.post("/chat/completions", json=body)).json()
        if reply["model"] == version:
            return time.monotonic() - begun


async def loop(base_url: str, folder: Path) -> tuple[dict[str, list[float]], list[list[int]]]:
    mails = MailStore(build(folder / "mails.sqlite3", n_train=STEPS * GROUPS, n_test=1, seed=7))
    scenarios = mails.scenarios("train")
    model = ChatART(model=POLICY, base_url=base_url, max_tokens=MAX_TOKENS)
    rollout = make_rollout(model, mails)
    seen: dict[str, list[float]] = {"sampled": [], "trained": [], "gap": [], "swap": [], "step": []}
    prompts: list[list[int]] = []
    async with AsyncArtClient(base_url) as client, httpx.AsyncClient(base_url=base_url) as http:
        for step in range(STEPS):
            part = scenarios[step * GROUPS : (step + 1) * GROUPS]
            begun = time.monotonic()
            done = await gather(rollout, part, group_size=SIZE, concurrency=GROUPS * SIZE)
            seconds = time.monotonic() - begun
            runs = [run for group in done.groups for run in group.trajectories]
            said = sum(t.usage.completion_tokens for run in runs for t in run.turns if t.usage)
            seen["sampled"].append(said / seconds)
            if not prompts:
                calls = [t.call_id for run in runs for t in run.turns if t.call_id]
                prompts = [(await client.call(one))["prompt_token_ids"] for one in calls[:256]]
            config = TrainConfig(learning_rate=1e-3)
            job = await client.train(done.groups, POLICY, config)
            result = await client.wait(job)
            metrics = result.metrics
            seen["trained"].append(metrics["tokens_trained"] / metrics["seconds"])
            seen["gap"].append(metrics["logprob_gap_mean"])
            seen["step"].append(metrics["seconds"])
            routed = await first_token_of(http, f"{POLICY}@{result.version}")
            seen["swap"].append(metrics["swap_seconds"] + routed)
    mails.close()
    return seen, prompts


def generate_tokens_per_second(prompts: list[list[int]]) -> float:
    """transformers' batched `generate` over the same prompts, 32 at a time, one thread."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(BASE_MODEL, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(BASE_MODEL, dtype=torch.float32)
    said, begun = 0, time.monotonic()
    for start in range(0, len(prompts), 32):
        part = prompts[start : start + 32]
        padded = tokenizer.pad({"input_ids": part}, return_tensors="pt")
        out = model.generate(
            **padded, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_TOKENS
        )
        new = out[:, padded["input_ids"].shape[1] :]
        said += int((new != tokenizer.pad_token_id).sum())
    return said / (time.monotonic() - begun)


def run() -> tuple[dict[str, float], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        with LocalServer(BASE_MODEL, policies=[POLICY], data_dir=Path(folder) / "data") as server:
            seen, prompts = asyncio.run(loop(server.base_url, Path(folder)))
        generated = generate_tokens_per_second(prompts)
    median = {name: statistics.median(values) for name, values in seen.items()}
    ours, theirs = import_seconds("import langchain_art"), import_seconds("import langchain_openai")
    figures = {
        "import_seconds": ours,
        "import_ratio_langchain_openai": theirs / ours,
        "swap_seconds": median["swap"],
        "sampler_learner_gap": max(seen["gap"]),
        "tokens_per_second_sampled": median["sampled"],
        "sampled_over_generate": median["sampled"] / generated,
        "tokens_per_second_trained": median["trained"],
        "learner_seconds_per_step": median["step"],
    }
    return figures, {"steps": STEPS, "agents_at_once": GROUPS * SIZE, "model": "email base, fp32"}
