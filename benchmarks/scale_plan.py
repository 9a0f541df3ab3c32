"""A plan for a million rollouts a day, of twelve calls each: what breaks first, and when.

Measured here: CPU of the gateway for a call of such a run (over the engine that answers at once, of
`benchmarks.gateway`), bytes and rows of a run in SQLite and in PostgreSQL, and how fast the one
writer of a database writes (`benchmarks.scaling.stored`). Computed from that and from parameters:
`benchmarks.scaling.plan`. Simulated, on three seeds: staleness, and how busy replicas and learner
are (`benchmarks.scaling.queues`). No GPU is measured: what one does is a parameter, and
``docs/scale.md`` says whose figure the default is.

``python -m benchmarks.scale_plan --runs-a-day 1e5 --decode 4000`` asks another question, with the
figures that were measured for the documentation.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.gateway import PATH, cpu_seconds, load
from benchmarks.scaling.plan import (
    DOCUMENTED,
    SLOTS_OF_REPLICA,
    Measured,
    Needs,
    Workload,
    breaks,
    gpu_seconds,
    needs,
)
from benchmarks.scaling.queues import Fit, Seen, simulate
from benchmarks.scaling.stored import Stored, measure, run_of
from langchain_art_server.config import sqlite_url
from tests.support.live_server import LiveServer
from tests.support.postgres import Postgres, programs

RUNS_A_DAY = (1e4, 1e5, 1e6, 1e7)
CALLERS, SECONDS, ROUNDS, RUNS, SEEDS = 64, 4.0, 5, 300, (1, 2, 3)
#: Mean seconds between two calls of a run, and how many steps ahead are simulated with it.
TOOL_SECONDS, AHEAD = 1.0, {1.0: (0, 1, 2, 4), 20.0: (2, 4, 8)}
console = Console()


def gateway_ms(workload: Workload) -> float:
    """CPU milliseconds of the gateway's process for a call of a run: median of its rounds."""
    bodies: list[Any] = []
    for number in range(CALLERS):
        _, records = run_of(f"run-{number}", workload)
        one = random.Random(number).choice(records)
        bodies.append([(PATH, {"model": "stub", **one.request})])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = LiveServer(Path(folder) / "data", module="benchmarks.gateways.ours").start()
        stack.callback(server.stop)
        for [(_, body)] in bodies:
            body["model"] = server.policy
        found: list[float] = []
        assert server.process is not None
        for _ in range(ROUNDS):
            before = cpu_seconds(server.process.pid)
            seen = load(server.port, bodies, SECONDS)
            found.append((cpu_seconds(server.process.pid) - before) / seen["calls"] * 1000)
    return statistics.median(found)


def stored(workload: Workload) -> dict[str, Stored]:
    """What both databases take, those that are here."""
    with tempfile.TemporaryDirectory() as folder:
        found = {"sqlite": asyncio.run(measure(sqlite_url(Path(folder)), workload, RUNS))}
    if programs() is not None:
        cluster = Postgres()
        try:
            found["postgresql"] = asyncio.run(measure(cluster.database(), workload, RUNS))
        finally:
            cluster.remove()
    return found


def fit_of(workload: Workload, known: Measured, asked: Needs, ahead: int) -> tuple[Fit, float]:
    """The fit on so many replicas and learners, and the seconds of one of its runs by itself."""
    busy, _ = gpu_seconds(workload, known)
    call = busy / workload.calls * SLOTS_OF_REPLICA
    learn = workload.runs_a_step * workload.learned_tokens / known.learn / asked.learners
    fit = Fit(
        runs_at_once=asked.replicas * SLOTS_OF_REPLICA,
        slots=asked.replicas * SLOTS_OF_REPLICA,
        calls=workload.calls,
        mean_call=call,
        mean_tool=TOOL_SECONDS,
        group=workload.group,
        groups_a_step=workload.runs_a_step // workload.group,
        steps_ahead=ahead,
        learn=learn,
    )
    return fit, workload.calls * (call + TOOL_SECONDS)


def tabulated(workload: Workload, known: Measured) -> dict[float, Needs]:
    """Prints what each number of rollouts a day asks for."""
    found: dict[float, Needs] = {}
    for runs in RUNS_A_DAY:
        load_ = replace(workload, runs_a_day=runs)
        rough = needs(load_, known, 0.0)
        _, seconds = fit_of(load_, known, rough, 0)
        found[runs] = needs(load_, known, seconds)
    table = Table("rollouts a day", *(f"{runs:,.0f}" for runs in found), title="needs")
    for name in asdict(found[RUNS_A_DAY[0]]):
        table.add_row(name, *(f"{getattr(one, name):.4g}" for one in found.values()))
    console.print(table)
    limits = Table("is over its limit", "from so many rollouts a day", title="what breaks first")
    for part, runs in breaks(workload, known).items():
        limits.add_row(part, f"{runs:,.0f}")
    console.print(limits)
    return found


def simulated(
    workload: Workload, known: Measured, asked: Needs
) -> dict[tuple[float, int], list[Seen]]:
    """Prints what the fit does with tools of some seconds and so many steps ahead."""
    found: dict[tuple[float, int], list[Seen]] = {}
    table = Table(
        "tool, s",
        "steps ahead",
        "rollouts a day",
        "staleness",
        "oldest",
        "replicas busy",
        "learner busy",
        title=f"simulated: {asked.replicas} replicas, {asked.learners} GPUs that learn",
    )
    for tool, ahead in [(tool, n) for tool, counts in AHEAD.items() for n in counts]:
        fit, _ = fit_of(workload, known, asked, ahead)
        # Enough workers: what bounds the runs is how far ahead they may be.
        at_once = (1 + ahead) * workload.runs_a_step
        fit = replace(fit, mean_tool=tool, runs_at_once=at_once)
        seen = [simulate(fit, seed, steps=20, warm_up=5) for seed in SEEDS]
        found[tool, ahead] = seen

        def mean(name: str, seen: list[Seen] = seen) -> float:
            return statistics.fmean(getattr(one, name) for one in seen)

        table.add_row(
            f"{tool:g}",
            str(ahead),
            f"{mean('runs_a_day'):,.0f}",
            f"{mean('mean_staleness'):.2f}",
            str(max(one.oldest for one in seen)),
            f"{mean('slots_busy'):.0%}",
            f"{mean('learner_busy'):.0%}",
        )
    console.print(table)
    return found


def answer(workload: Workload, known: Measured) -> dict[str, float]:
    """The plan of one workload, printed; what it says in figures."""
    tabulated(workload, known)
    rough = needs(workload, known, 0.0)
    _, seconds = fit_of(workload, known, rough, 0)
    asked = needs(workload, known, seconds)
    fits = simulated(workload, known, asked)
    ahead, turns = fits[TOOL_SECONDS, 2], fits[TOOL_SECONDS, 0]
    return asdict(asked) | {
        "staleness_2_ahead": statistics.fmean(one.mean_staleness for one in ahead),
        "runs_a_day_2_ahead": statistics.fmean(one.runs_a_day for one in ahead),
        "runs_a_day_0_ahead": statistics.fmean(one.runs_a_day for one in turns),
    }


def run() -> tuple[dict[str, float], dict[str, Any]]:
    workload = Workload()
    databases = stored(workload)
    of_sqlite = databases["sqlite"]
    known = replace(
        DOCUMENTED,
        gateway_ms=gateway_ms(workload),
        bytes_of_run=of_sqlite.bytes_of_run,
        runs_written_a_second=of_sqlite.runs_a_second,
        runs_deleted_a_second=of_sqlite.deleted_a_second,
        rows_of_run=of_sqlite.rows_of_run,
    )
    figures = answer(workload, known)
    figures |= {"gateway_ms": known.gateway_ms}
    for name, one in databases.items():
        figures |= {f"{name}_{what}": value for what, value in asdict(one).items()}
    return figures, {"workload": asdict(workload), "known": asdict(known)}


def main(
    runs_a_day: Annotated[float, typer.Option(help="Rollouts a day.")] = 1e6,
    decode: Annotated[
        float, typer.Option(help="Sampled tokens/s of a replica.")
    ] = DOCUMENTED.decode,
    prefill: Annotated[float, typer.Option(help="Prompt tokens/s of it.")] = DOCUMENTED.prefill,
    learn: Annotated[float, typer.Option(help="Tokens/s that a GPU learns.")] = DOCUMENTED.learn,
) -> None:
    """What so many rollouts a day need, with the figures of docs/scale.md for what it measured."""
    known = replace(DOCUMENTED, decode=decode, prefill=prefill, learn=learn)
    answer(replace(Workload(), runs_a_day=runs_a_day), known)


if __name__ == "__main__":
    typer.run(main)
