"""Calls per second of the gateway, against agent-lightning's, and what it takes from an engine.

``calls_ratio_agl``: both gateways get the same 64 callers of the same client, with prompts of 14
messages and replies of 128 tokens with logprobs, from an engine that answers at once in a process
of its own. Ours asks it over the worker's socket, as it asks the embedded engine; agent-lightning's
over HTTP, as it asks vLLM. Ours has each record on disk before the reply leaves; theirs keeps it in
memory. agent-lightning stands in an environment of its own, with uvloop and httptools, which are
not among its requirements but make it faster.

Ours is asked with the key of a tenant, which has limits of every kind, while its ``/metrics`` are
read every two seconds.

``dialect_ratio``: the same calls in OpenAI's Responses and in Anthropic's Messages, calls per
second over those of chat completions; the worse of the two.

``over_engine``: the embedded engine samples the same calls once behind the gateway, asked by a
client in a process of its own, and once driven from a program without HTTP and store: tokens per
second, the former over the latter. Rounds alternate in both.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gateways.bare import drive, make_model
from benchmarks.gateways.exchange import in_messages, in_responses, messages
from langchain_art import ArtClient, KeyLimits
from langchain_art.wire.api_keys import new_api_key
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.config import Settings
from tests.support.environments import environment
from tests.support.live_server import LiveServer, free_port

CALLERS, SECONDS, ROUNDS, SCRAPE = 64, 4.0, 5, 2.0
#: Of `over_engine`: calls of each caller in a round, tokens of a reply at most. All callers begin a
#: round at once, which the engine itself is asked without a pause and the gateway in the time of 64
#: calls: with two calls each, a round is half beginning.
CALLS, MAX_TOKENS = 8, 64
#: It asks for Python 3.12, but its gateway uses nothing that 3.11 lacks: the same Python for both.
AGL = ["--ignore-requires-python", "agentlightning==1.0.2", "uvicorn[standard]"]
PATH = "/v1/chat/completions"
#: The other formats of a call.
FORMATS = {"/v1/responses": in_responses, "/v1/messages": in_messages}


@dataclass
class Gateway:
    """A gateway that runs, and what was seen of it, round by round."""

    pid: int
    port: int
    callers: list[list[Any]]
    key: str | None = None
    rates: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    calls: int = 0

    def measure(self) -> None:
        before = cpu_seconds(self.pid)
        seen = load(self.port, self.callers, SECONDS, self.key)
        self.cpu.append((cpu_seconds(self.pid) - before) / seen["calls"])
        self.rates.append(seen["calls"] / seen["seconds"])
        self.calls += int(seen["calls"])


def cpu_seconds(pid: int, *, ended: bool = False) -> float:
    """User and system time of a process, all threads; `ended`: and of children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = sum(int(one) for one in fields[11 : 15 if ended else 13])
    return ticks / os.sysconf("SC_CLK_TCK")


def load(
    port: int, callers: list[list[Any]], seconds: float | None, key: str | None = None
) -> dict[str, float]:
    asked = {"port": port, "callers": callers, "seconds": seconds, "key": key}
    argv = [sys.executable, "-m", "benchmarks.gateways.client"]
    done = subprocess.run(argv, input=json.dumps(asked), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


@contextmanager
def process(argv: list[str], cwd: Path, port: int) -> Iterator[int]:
    """A server as a child process, once it takes connections."""
    env = os.environ | {"PYTHONPATH": str(Path.cwd())}
    child = subprocess.Popen(
        argv, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5)
                if answer.status_code != 503:  # it loads its model
                    break
            except httpx.TransportError:
                pass
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{argv} did not start")
            time.sleep(0.05)
        yield child.pid
    finally:
        child.terminate()
        child.wait()


@contextmanager
def agent_lightning(folder: Path) -> Iterator[Gateway]:
    upstream, port = free_port(), free_port()
    engine = [sys.executable, "-m", "benchmarks.gateways.upstream", str(upstream)]
    argv = [str(environment("agentlightning", AGL)), "-m", "agentlightning.server"]
    argv += ["host=127.0.0.1", f"port={port}", "default_proxy.model_name=stub"]
    with process(engine, folder, upstream), process(argv, folder, port) as pid:
        api = f"http://127.0.0.1:{port}/api"
        endpoint = {"model": "stub", "endpoint": f"http://127.0.0.1:{upstream}/v1"}
        httpx.post(f"{api}/models", json=[endpoint]).raise_for_status()
        rollouts = [{"input": {}, "rollout_id": f"r-{i}"} for i in range(CALLERS)]
        httpx.post(f"{api}/rollouts", json=rollouts).raise_for_status()
        path = "/proxy/rollout/r-{}/attempt/0/mode/train/openai" + PATH
        bodies = [{"model": "stub", "messages": messages(i)} for i in range(CALLERS)]
        yield Gateway(pid, port, [[(path.format(i), body)] for i, body in enumerate(bodies)])


def tenants_key(server: LiveServer) -> str:
    """A key of a tenant of its own, with limits that are counted and never reached."""
    most = 2**40
    limits = KeyLimits(
        calls_per_minute=most, tokens_per_minute=most, concurrent_calls=most, stored_bytes=most
    )
    with ArtClient(server.base_url, api_key=server.api_key) as administrator:
        key = administrator.create_key("benchmark", tenant="benchmark", limits=limits).key
    with ArtClient(server.base_url, api_key=key) as tenant:
        tenant.create_policy(server.policy)
    return key


@contextmanager
def scraped(server: LiveServer) -> Iterator[None]:
    """Read a server's metrics meanwhile, as Prometheus does, but every `SCRAPE` seconds."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(SCRAPE):
            http.get("/metrics").raise_for_status()

    with server.http() as http, ThreadPoolExecutor(1) as pool:
        scraping = pool.submit(scrape)
        try:
            yield
        finally:
            over.set()
            scraping.result()


@contextmanager
def ours(folder: Path) -> Iterator[Gateway]:
    env = {"ART_API_KEY": new_api_key()}
    server = LiveServer(folder / "data", module="benchmarks.gateways.ours", env=env).start()
    assert server.process is not None
    key = tenants_key(server)
    try:
        callers: list[list[Any]] = []
        for i in range(CALLERS):
            body = {"model": server.policy, "messages": messages(i)}
            callers.append([(PATH, body | {"art": {"trajectory_id": f"r-{i}", "node": "agent"}})])
        gateway = Gateway(server.process.pid, server.port, callers, key)
        with scraped(server):
            yield gateway
        server.api_key = key
        recorded = server.http().get("/status").json()["calls"]
        assert recorded >= gateway.calls, "a reply left without its record"
    finally:
        server.stop()


def in_format(chat: Gateway, path: str) -> Gateway:
    """The same gateway, asked for the same in another format."""
    callers: list[list[Any]] = []
    for [(_, body)] in chat.callers:
        fields = {name: value for name, value in body.items() if name != "messages"}
        callers.append([(path, fields | FORMATS[path](body["messages"]))])
    return Gateway(chat.pid, chat.port, callers, chat.key)


def against_agent_lightning(folder: Path) -> dict[str, float]:
    with ExitStack() as stack:
        mine = stack.enter_context(ours(folder))
        theirs = stack.enter_context(agent_lightning(folder))
        others = [in_format(mine, path) for path in FORMATS]
        for gateway in (mine, theirs, *others):
            load(gateway.port, gateway.callers, 1.0, gateway.key)
        for _ in range(ROUNDS):
            mine.measure()
            theirs.measure()
            for gateway in others:
                gateway.measure()
                mine.calls += gateway.calls
                gateway.calls = 0
    median = statistics.median
    formats = [median(a / b for a, b in zip(one.rates, mine.rates, strict=True)) for one in others]
    ratios = [a / b for a, b in zip(mine.rates, theirs.rates, strict=True)]
    return {
        "calls_ratio_agl": median(ratios),
        "calls_per_second": median(mine.rates),
        "calls_per_second_agl": median(theirs.rates),
        "cpu_us_per_call": median(mine.cpu) * 1e6,
        "cpu_us_per_call_agl": median(theirs.cpu) * 1e6,
        "cpu_ratio_agl": median(theirs.cpu) / median(mine.cpu),
        "dialect_ratio": min(formats),
    }


async def over_engine(folder: Path) -> dict[str, float]:
    model = make_model(folder / "model")
    env = {"ART_API_KEY": new_api_key()}
    server = LiveServer(folder / "engine", model=model, env=env).start()
    key = tenants_key(server)
    sampler = TransformersSampler(Settings(model=str(model), served_model_name=server.base_name))
    await sampler.start()
    bare: list[float] = []
    served: list[float] = []
    try:
        with scraped(server):
            for turn in range(ROUNDS + 1):
                work = _work(server.base_name, turn)
                for rates in (bare, served) if turn % 2 else (served, bare):
                    if rates is bare:
                        seen = await drive(sampler, work)
                    else:
                        seen = await asyncio.to_thread(load, server.port, work, None, key)
                    if turn:  # the first is to warm up
                        rates.append(seen["tokens"] / seen["seconds"])
    finally:
        await sampler.close()
        server.stop()
    ratios = [a / b for a, b in zip(served, bare, strict=True)]
    return {
        "over_engine": statistics.median(ratios),
        "tokens_per_second": statistics.median(served),
        "tokens_per_second_bare": statistics.median(bare),
    }


def _work(model: str, turn: int) -> list[list[Any]]:
    """Prompts that share nothing with those of another round, so that no cache helps."""
    callers: list[list[Any]] = []
    for caller in range(CALLERS):
        seeds = [(turn * CALLERS + caller) * CALLS + call for call in range(CALLS)]
        bodies = [{"model": model, "messages": messages(s)[1:2], "seed": s} for s in seeds]
        callers.append([(PATH, body | {"max_tokens": MAX_TOKENS}) for body in bodies])
    return callers


def run() -> tuple[dict[str, float], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        figures = against_agent_lightning(Path(name)) | asyncio.run(over_engine(Path(name)))
    about = {"callers": CALLERS, "rounds": ROUNDS, "prompt_messages": 14, "reply_tokens": 128}
    return figures, about | {"engine": "Qwen3 h384 l4, fp32, 64 tokens after 70"}
