"""Fills a server's database with runs and steps of training, as the gateway would, but faster.

Rows are made by the store's own functions, in other processes, and inserted many at a time, in
transactions that do not wait for the disk.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import sqlalchemy as sa

from langchain_art.wire import CallTags, Review, TrainRequest, TrainResult, Trajectory, Turn, Usage
from langchain_art_server.storage.run_index import RunIndex, write_index
from langchain_art_server.storage.seals import sealed
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import (
    CALLS,
    RUN_CALLS,
    TRAJECTORIES,
    CallRecord,
    trajectory_row,
)

CALLS_OF_RUN, GROUP, STEPS = 12, 8, 600
WORDS = [f"word{number}" for number in range(5000)]
#: Runs that a process makes at a time.
_PART = 500
#: What a step measures, as the overview draws it.
METRICS = (
    "reward_mean",
    "loss",
    "grad_norm",
    "kl",
    "kl_reference",
    "entropy",
    "logprob_gap_mean",
    "staleness_mean",
    "importance_ess",
    "tokens_trained",
    "calls_trained",
    "seconds",
    "swap_seconds",
)
_NODES = ("plan", "search", "critic", "write")


def said(draw: random.Random, first: str) -> str:
    return " ".join([first, *draw.choices(WORDS, k=20)])


def version_of(number: int, runs: int) -> int:
    return number * min(STEPS, runs // GROUP) // runs


def run_of(number: int, runs: int) -> tuple[Trajectory, list[CallRecord]]:
    """The `number`-th of `runs`, and what the gateway recorded of its calls."""
    draw = random.Random(number)
    policy, version = "rare" if number % 20_011 == 0 else "writer", version_of(number, runs)
    ids = draw.choices(range(150_000), k=240)
    records: list[CallRecord] = []
    for index in range(CALLS_OF_RUN):
        node = _NODES[index % 4]
        sampled = draw.randrange(20, 60)
        question = {"role": "user", "content": said(draw, "question")}
        records.append(
            CallRecord(
                id=f"call-{number}-{index}",
                created_at=1.7e9 + number + index,
                policy=policy,
                version=version,
                model=f"{policy}@{version}",
                tags=CallTags(trajectory_id=f"run-{number}", node=node),
                request={"messages": [question]},
                reply={"role": "assistant", "content": said(draw, "answer")},
                prompt_token_ids=ids[:40],
                token_ids=ids[-sampled:],
                logprobs=[-one / 150_000 for one in ids[:sampled]],
                temperature=1.0,
                finish_reason="stop",
                excluded_because=None,
                latency=0.5,
                began=number * CALLS_OF_RUN + index,
            )
        )
    run = Trajectory(
        id=f"run-{number}",
        scenario=f"s-{number // GROUP % 1000}",
        turns=tuple(
            _turn(one, number, index - 1 if index else None) for index, one in enumerate(records)
        ),
        input="needle" if number == min(31_337, runs - 1) else None,
        reward=draw.random(),
        scores={"ruler": draw.random(), "tests": float(draw.random() < 0.5)},
        status="failed" if draw.random() < 0.05 else "completed",
    )
    return run, records


def _turn(one: CallRecord, second: int, extends: int | None) -> Turn:
    return Turn(
        call_id=one.id,
        node=one.tags.node,
        model=one.model,
        extends=extends,
        messages=tuple(one.request["messages"]),
        reply=one.reply,
        usage=Usage(prompt_tokens=len(one.prompt_token_ids), completion_tokens=len(one.token_ids)),
        started_at=one.created_at,
        latency=one.latency,
    )


def long_run(name: str, calls: int, tokens: int) -> tuple[Trajectory, list[CallRecord]]:
    """A run of `calls` calls with `tokens` sampled tokens each; ten calls are one conversation."""
    draw = random.Random(0)
    records: list[CallRecord] = []
    prompt: list[int] = []
    for index in range(calls):
        prompt = [*prompt, *draw.choices(range(50, 300), k=20)] if index % 10 else [index + 50]
        sampled = draw.choices(range(50, 300), k=tokens)
        records.append(
            CallRecord(
                id=f"{name}-{index}",
                created_at=1.7e9 + index,
                policy="tiny",
                version=0,
                model="tiny@0",
                tags=CallTags(trajectory_id=name, node="writer"),
                request={"messages": [{"role": "user", "content": "Go on."}]},
                reply={"role": "assistant", "content": " ".join(draw.choices(WORDS, k=tokens))},
                prompt_token_ids=prompt,
                token_ids=sampled,
                logprobs=[-draw.random() for _ in sampled],
                temperature=1.0,
                finish_reason="stop",
                excluded_because=None,
                latency=0.5,
                began=index,
            )
        )
        prompt = [*prompt, *sampled]
    turns = [_turn(one, 0, at - 1 if at % 10 else None) for at, one in enumerate(records)]
    return Trajectory(id=name, scenario="long", turns=tuple(turns), reward=1.0), records


@dataclass
class Rows:
    """Some runs as rows, with their seals."""

    calls: list[tuple[Any, ...]]
    runs: list[tuple[Any, ...]]
    links: list[tuple[Any, ...]]
    index: list[RunIndex]


def _tuples(table: sa.Table, rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    names = _columns(table)
    return [tuple(map(sealed(table, row).get, names)) for row in rows]


def _columns(table: sa.Table) -> list[str]:
    """Those that are given: the database numbers the rows by itself."""
    return [one.name for one in table.columns if one.name != "number"]


def rows_of(start: int, end: int, runs: int) -> Rows:
    """The runs from `start` to before `end` of `runs`, as `Store` would write them."""
    made = [run_of(number, runs) for number in range(start, end)]
    links = [
        {"trajectory_id": run.id, "call_id": one.id} for run, records in made for one in records
    ]
    return Rows(
        _tuples(CALLS, [one.row() for _, records in made for one in records]),
        _tuples(TRAJECTORIES, [trajectory_row(run, None) for run, _ in made]),
        _tuples(RUN_CALLS, links),
        [RunIndex.of(run) for run, _ in made],
    )


def _write(connection: sa.Connection, rows: Rows) -> None:
    for table, some in ((CALLS, rows.calls), (TRAJECTORIES, rows.runs), (RUN_CALLS, rows.links)):
        names = _columns(table)
        marks = ", ".join("?" * len(names))
        statement = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({marks})"
        connection.exec_driver_sql(statement, some)
    write_index(connection, rows.index)


async def fill(store: Store, runs: int) -> None:
    """Write `runs` runs of `CALLS_OF_RUN` calls to an empty database of SQLite.

    Beside them a fit of `STEPS` steps that trained on the runs of one version each, and a review of
    every hundredth run. Which calls a step trained is not marked: no list reads it.
    """
    for pragma in ("synchronous=OFF", "cache_size=-1000000"):
        await store.write(lambda c, pragma=pragma: c.exec_driver_sql(f"PRAGMA {pragma}"))
    for rows in _made(runs):
        await store.write(lambda c, rows=rows: _write(c, rows))
    by_version: dict[int, list[str]] = {}
    for number in range(runs):
        by_version.setdefault(version_of(number, runs), []).append(f"run-{number}")
    for version, ids in by_version.items():
        await _train(store, version, ids)
    await store.reviews.put([_review(number) for number in range(0, runs, 100)])


async def _train(store: Store, version: int, ids: list[str]) -> None:
    """A step, from `version` to the next one."""
    draw, job = random.Random(version), f"job-{version}"
    groups = [ids[start : start + GROUP] for start in range(0, len(ids), GROUP)]
    request = TrainRequest.model_validate({"policy": "writer", "groups": groups})
    result = TrainResult(
        policy="writer",
        version=version + 1,
        metrics={name: draw.random() for name in METRICS},
        excluded={"calls.already_trained": draw.randrange(9), "runs.no_reward": draw.randrange(9)},
    )
    scored = [Trajectory(id=one, turns=(), reward=draw.random()) for one in ids]
    await store.jobs.add(job, f"demo:writer:step:{version + 1}", request, scored, 8)
    await store.jobs.begin(job, version, version + 1)
    await store.jobs.finish(job, result, None, trained=ids, message="published")


def _review(number: int) -> Review:
    return Review(
        id=f"review-{number}",
        source="page",
        trajectory=f"run-{number}",
        kind="reward",
        name="human_reward",
        value=1.0,
        reviewer="ann",
        at=1.8e9,
    )


def _made(runs: int) -> Iterator[Rows]:
    """The rows of all runs in their order, made by other processes a little ahead."""
    if runs <= _PART:
        yield rows_of(0, runs, runs)
        return
    starts = range(0, runs, _PART)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        ahead: list[Future[Rows]] = []
        for start in starts:
            ahead.append(pool.submit(rows_of, start, min(start + _PART, runs), runs))
            if len(ahead) > 4:
                yield ahead.pop(0).result()
        for one in ahead:
            yield one.result()
