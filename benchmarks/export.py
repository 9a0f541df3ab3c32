"""What an export costs the training process: ours, and Langfuse's own callback handler.

CPU time of this process alone, all of its threads: writing the spool and sending it are in ours,
the SDK's exporter is in theirs. The runs are those of one tool agent (LangChain's ``create_agent``)
of 13 calls, whose model is a stub in another process that answers at once with 128 tokens, and
which is the sink of both exports, too. What is compared is what each adds to the same agent: ours
to one that is captured, which training needs anyway (``…_with_capture``: to a bare one).

A client that is to train has to be told the logprobs: in ``export_…_ratio`` the handler sees the
replies of a `ChatOpenAI` that asks for them, and writes them into the state of every node. In
``…_bare`` it sees replies without them. Bytes are those on the wire, compressed, of all requests.

``fit_delay_seconds_worst``: a fit of 20 steps on a real server, seven times, with a Langfuse that
is refused, hangs, answers 500, 429 or 401, is slow (5 s) or dies in the middle: the most that one
of them waited for its export, from the first step to the end of `Trainer.fit`.
"""

from __future__ import annotations

import gc
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.capture import search, stub
from langchain_art import ChatART, Exporter, Trainer, capture
from langchain_art.export.spool import Spool
from tests.support.graphs import ASK, Scripted, graph_of, node
from tests.support.langfuse_server import LangfuseServer
from tests.support.live_server import LiveServer

CALLS, RUNS, ROUNDS = 13, 8, 7
STEPS = 20
FAULTS = ("refused", "hang", "500", "429", "401", "slow", "die")
ASKED = {"messages": [("user", "When did Ann write about the Falcon project, and to whom?")]}
LIMIT: dict[str, Any] = {"recursion_limit": 1000}


@contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= values
    yield
    os.environ.clear()
    os.environ |= before


def subjects(url: str, folder: Path) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Name -> one run, and what ends the export of the runs before."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI
    from langfuse import Langfuse
    from langfuse.langchain import CallbackHandler

    spool = Spool(folder / "spool")
    exporter = Exporter(spool=spool.folder)
    langfuse = Langfuse(public_key="pk-bench", secret_key="sk-bench", base_url=url, flush_at=200)
    handler = CallbackHandler(public_key="pk-bench")
    told: dict[str, Any] = {"model": "agent", "api_key": "none", "max_tokens": 128}
    ours = create_agent(ChatART(model="agent", base_url=f"{url}/tools/{CALLS}/v1"), [search])
    watched = ChatOpenAI(base_url=f"{url}/logprob-tools/{CALLS}/v1", logprobs=True, **told)
    theirs = create_agent(watched, [search])

    def captured(export: Exporter | None) -> None:
        with capture(scenario="q-7", export=export) as run:
            ours.invoke(ASKED, LIMIT)
            run.reward = 1.0
        run.trajectory()

    def sent() -> None:
        exporter.close()
        while spool.count():  # its thread goes on if the machine is busy
            time.sleep(0.01)

    def nothing() -> None:
        pass

    def traced(agent: Any) -> Callable[[], None]:
        return lambda: agent.invoke(ASKED, {**LIMIT, "callbacks": [handler]})

    return {
        "bare": (lambda: ours.invoke(ASKED, LIMIT), nothing),
        "captured": (lambda: captured(None), nothing),
        "exported": (lambda: captured(exporter), sent),
        "langfuse_bare": (traced(ours), langfuse.flush),
        "logprobs": (lambda: theirs.invoke(ASKED, LIMIT), nothing),
        "langfuse": (traced(theirs), langfuse.flush),
    }


def costs(url: str, folder: Path) -> tuple[dict[str, float], dict[str, Any]]:
    cpu: dict[str, list[float]] = {}
    sizes: dict[str, list[float]] = {}
    found = subjects(url, folder)
    for round_ in range(ROUNDS + 1):  # the first warms up
        for name, (run, end) in found.items():
            gc.collect()
            seen = json.load(urlopen(f"{url}/seen"))["bytes"]
            begun = time.process_time()
            for _ in range(RUNS):
                run()
            end()
            spent = (time.process_time() - begun) / (RUNS * CALLS) * 1e6
            size = (json.load(urlopen(f"{url}/seen"))["bytes"] - seen) / RUNS
            if round_:
                cpu.setdefault(name, []).append(spent)
                sizes.setdefault(name, []).append(size)

    def adds(name: str, to: str) -> list[float]:
        return [more - less for more, less in zip(cpu[name], cpu[to], strict=True)]

    def ratio(theirs: list[float], ours: list[float]) -> float:
        return statistics.median(t / o for t, o in zip(theirs, ours, strict=True))

    whole, bare = adds("langfuse", "logprobs"), adds("langfuse_bare", "bare")
    ours, with_capture = adds("exported", "captured"), adds("exported", "bare")
    bytes_ = {name: statistics.median(values) for name, values in sizes.items()}
    figures = {
        "export_cpu_ratio": ratio(whole, ours),
        "export_cpu_ratio_bare": ratio(bare, ours),
        "export_cpu_ratio_with_capture": ratio(whole, with_capture),
        "export_bytes_ratio": bytes_["langfuse"] / bytes_["exported"],
        "export_bytes_ratio_bare": bytes_["langfuse_bare"] / bytes_["exported"],
        "export_us": statistics.median(ours),
        "langfuse_us": statistics.median(whole),
        "langfuse_bare_us": statistics.median(bare),
        "export_bytes": bytes_["exported"],
    }
    return figures, {f"{name}_us": statistics.median(values) for name, values in cpu.items()}


async def rollout(scenario: str) -> float:
    await graph_of(writer=node(Scripted(lines=["Monday"]))).compile().ainvoke(ASK)
    return float(len(scenario))


def delays(folder: Path) -> tuple[dict[str, float], dict[str, Any]]:
    from rich.console import Console

    waited: dict[str, float] = {}
    wall: dict[str, float] = {}
    server = LiveServer(folder / "data").start()
    try:
        for fault in (None, *FAULTS):
            with LangfuseServer() as langfuse, variables(langfuse.environment):
                langfuse.fault = fault  # type: ignore[assignment]
                exporter, quiet = Exporter(), Console(file=io.StringIO())
                trainer = Trainer(
                    ChatART(model=f"delayed-{fault}".lower(), base_url=server.base_url),
                    group_size=2,
                    groups_per_step=2,
                    out_dir=folder / str(fault),
                    export=exporter,
                    console=quiet,
                )
                begun = time.monotonic()
                trainer.fit_sync(rollout, ["a", "bb", "ccc"], steps=STEPS)
                wall[str(fault)] = round(time.monotonic() - begun, 2)
                waited[str(fault)] = exporter.waited
    finally:
        server.stop()
    worst = max(seconds for fault, seconds in waited.items() if fault != "None")
    figures = {"fit_delay_seconds_worst": worst, "fit_delay_seconds_healthy": waited["None"]}
    rounded = {fault: round(seconds, 3) for fault, seconds in waited.items()}
    return figures, {"fit_delay_seconds": rounded, "fit_seconds": wall}


def run() -> tuple[dict[str, float], dict[str, Any]]:
    quiet = {"LANGSMITH_TRACING": "false", "LANGFUSE_TRACING_ENABLED": "true"}
    keys = {"LANGFUSE_PUBLIC_KEY": "pk-bench", "LANGFUSE_SECRET_KEY": "sk-bench"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with stub() as url, variables(quiet | keys | {"LANGFUSE_BASE_URL": url}):
            figures, spent = costs(url, folder)
        with variables(quiet):
            delayed, seconds = delays(folder)
    return figures | delayed, {
        "calls_per_run": CALLS,
        "runs_per_round": RUNS,
        "rounds": ROUNDS,
        "steps": STEPS,
        "cpu_us_a_call": spent,
        **seconds,
        "langfuse": version("langfuse"),
        "load_at_end": round(os.getloadavg()[0], 2),
    }
