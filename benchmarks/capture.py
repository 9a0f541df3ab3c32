"""What a captured call costs its process: ours, and `ChatOpenAI` with Langfuse's handler.

CPU time of this process alone, all of its threads (Langfuse exports in one). The model is a stub in
another process that answers at once with 128 tokens. A run is what a tool agent makes of 13 calls:
prompts of 2, 4 … 26 messages, 14 on average. Ours includes the scope around a run and the finished
trajectory; Langfuse's includes its exporter, whose sink is the same stub, so that nothing leaves
the machine. Rounds alternate between all subjects, and each figure is the median of the rounds.

A client that is to train has to be told the logprobs: `ChatOpenAI` asks for them, and the stub
gives them. Ours stay on our server. The figures ending in ``_bare`` are `ChatOpenAI`'s without
them, for those who only watch.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any
from urllib.request import urlopen

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool

from benchmarks.stubs.chat import CALL, TEXT
from langchain_art import CaptureHandler, ChatART, capture

CALLS, RUNS, ROUNDS = 13, 10, 9
SEARCH = {"name": "search", "args": {"query": "falcon"}, "id": CALL["id"], "type": "tool_call"}


@contextmanager
def stub() -> Iterator[str]:
    argv = [sys.executable, "-m", "benchmarks.stubs.chat"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def opening() -> list[BaseMessage]:
    return [
        SystemMessage("You answer questions about somebody's mail. Search before you answer."),
        HumanMessage("When did Ann write about the Falcon project, and to whom?"),
    ]


def result(number: int) -> ToolMessage:
    return ToolMessage(f"Mail {number}: it begins on Monday. " * 8, tool_call_id=CALL["id"])


class Floor(BaseChatModel):
    """LangChain's own part of a call: a model that answers without a request."""

    @property
    def _llm_type(self) -> str:
        return "floor"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(
            generations=[ChatGeneration(message=AIMessage(TEXT, tool_calls=[SEARCH]))]
        )

    async def _agenerate(
        self, messages: list[BaseMessage], *args: Any, **kwargs: Any
    ) -> ChatResult:
        return self._generate(messages)


Run = Callable[[], Awaitable[None]]


def asked(
    model: BaseChatModel, *, wait: bool, handler: Callable[[], BaseCallbackHandler] | None = None
) -> Run:
    """A run that only asks, with ``invoke`` or, if `wait`, with ``ainvoke``."""

    async def run() -> None:
        config: RunnableConfig | None = {"callbacks": [handler()]} if handler else None
        said = opening()
        for number in range(CALLS):
            prompt = list(said)
            reply = await model.ainvoke(prompt, config) if wait else model.invoke(prompt, config)
            said += [reply, result(number)]

    return run


def captured(model: BaseChatModel, *, wait: bool) -> Run:
    ask = asked(model, wait=wait)

    async def run() -> None:
        with capture(scenario="q-7") as told:
            await ask()
        assert [turn.extends for turn in told.trajectory().turns] == [None, *range(CALLS - 1)]

    return run


def microseconds(runner: asyncio.Runner, run: Run, after: Callable[[], None]) -> float:
    """CPU time of one call, the mean of `RUNS` runs."""

    async def runs() -> None:
        for _ in range(RUNS):
            await run()

    gc.collect()
    begun = time.process_time()
    runner.run(runs())
    after()
    return (time.process_time() - begun) / (RUNS * CALLS) * 1e6


@tool
def search(query: str) -> str:
    """Search the mails."""
    return f"{query}: the project begins on Monday. " * 8


def agent_bytes(url: str, calls: int) -> int:
    """Size of the trajectory of a tool agent that answers after so many calls."""
    from langchain.agents import create_agent

    model = ChatART(model="agent", base_url=f"{url}/tools/{calls}/v1")
    agent = create_agent(model, [search])
    with capture(scenario="q-7") as run:
        agent.invoke({"messages": [("user", "When?")]}, {"recursion_limit": 1000})
    trajectory = run.trajectory()
    assert len(trajectory.turns) == calls
    return len(trajectory.model_dump_json(exclude_defaults=True))


def subjects(url: str) -> tuple[dict[str, Run], Callable[[], None]]:
    """All that is measured, and what exports Langfuse's last traces."""
    from langchain_openai import ChatOpenAI
    from langfuse import Langfuse
    from langfuse.langchain import CallbackHandler

    langfuse = Langfuse(public_key="pk-bench", secret_key="sk-bench", base_url=url)
    traced = CallbackHandler(public_key="pk-bench")
    ours = ChatART(model="agent", base_url=f"{url}/art/v1", max_tokens=128)
    openai: dict[str, Any] = {"model": "agent", "api_key": "none", "max_tokens": 128}
    plain = ChatOpenAI(base_url=f"{url}/logprobs/v1", logprobs=True, **openai)
    bare = ChatOpenAI(base_url=f"{url}/art/v1", **openai)
    found: dict[str, Run] = {}
    for way, wait in (("sync", False), ("async", True)):
        found |= {
            f"art_{way}": asked(ours, wait=wait),
            f"captured_{way}": captured(ours, wait=wait),
            f"openai_{way}": asked(plain, wait=wait),
            f"openai_bare_{way}": asked(bare, wait=wait),
            f"langfuse_{way}": asked(plain, wait=wait, handler=lambda: traced),
            f"langfuse_bare_{way}": asked(bare, wait=wait, handler=lambda: traced),
            f"floor_{way}": asked(Floor(), wait=wait),
            f"callback_{way}": asked(Floor(), wait=wait, handler=CaptureHandler),
        }
    return found, langfuse.flush


def run() -> tuple[dict[str, float], dict[str, Any]]:
    os.environ |= {"LANGSMITH_TRACING": "false", "LANGFUSE_TRACING_ENABLED": "true"}
    seen: dict[str, list[float]] = {}
    with stub() as url, asyncio.Runner() as runner:
        runs, flush = subjects(url)
        for round_ in range(ROUNDS + 1):  # the first warms up
            for name, subject in runs.items():
                after = flush if "langfuse" in name else lambda: None
                spent = microseconds(runner, subject, after)
                if round_:
                    seen.setdefault(name, []).append(spent)
        traces = json.load(urlopen(f"{url}/seen"))
        sizes = {calls: agent_bytes(url, calls) for calls in (20, 40)}
    assert traces["traces"] > 0, "Langfuse exported nothing"
    figures = ratios(seen) | {
        "callback_us": max(over(seen, "callback", "floor", way) for way in ("sync", "async")),
        "bytes_20": float(sizes[20]),
        "bytes_40_over_20": sizes[40] / sizes[20],
    }
    figures |= {f"{name}_us": statistics.median(values) for name, values in seen.items()}
    return figures, {
        "calls_per_run": CALLS,
        "runs_per_round": RUNS,
        "rounds": ROUNDS,
        "traces_exported": traces["traces"],
        "langfuse": version("langfuse"),
        "langchain_openai": version("langchain-openai"),
        "load_at_end": round(os.getloadavg()[0], 2),
    }


def over(seen: dict[str, list[float]], name: str, floor: str, way: str) -> float:
    """What `name` adds to `floor`: the median over the rounds."""
    pairs = zip(seen[f"{name}_{way}"], seen[f"{floor}_{way}"], strict=True)
    return statistics.median(more - less for more, less in pairs)


def ratios(seen: dict[str, list[float]]) -> dict[str, float]:
    """Theirs ÷ ours with capture, in the same round; the lesser of invoke and ainvoke first."""
    peers = {
        "cpu_ratio": "langfuse",
        "cpu_ratio_bare": "langfuse_bare",
        "cpu_ratio_plain": "openai",
        "cpu_ratio_plain_bare": "openai_bare",
    }
    figures: dict[str, float] = {}
    for figure, peer in peers.items():
        for way in ("sync", "async"):
            pairs = zip(seen[f"{peer}_{way}"], seen[f"captured_{way}"], strict=True)
            figures[f"{figure}_{way}"] = statistics.median(theirs / ours for theirs, ours in pairs)
        figures[figure] = min(figures[f"{figure}_sync"], figures[f"{figure}_async"])
    return dict(sorted(figures.items()))
