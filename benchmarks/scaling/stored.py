"""What a run of twelve calls takes in a database, and how fast its one writer writes: measured.

Rows are the store's own, by its own functions, as the gateway and the routes call them. The texts
of prompts are this documentation's, so that compression has something to do that is like work; ids
and logprobs are random, which nothing compresses.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.scaling.plan import Workload
from langchain_art.wire import CallTags, Trajectory, Turn, Usage
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import META, CallRecord

DOCS = Path(__file__).parents[2] / "docs"
#: Characters of a token, of English in most tokenizers.
_CHARACTERS = 4
_VOCABULARY = 151_936
#: Calls that wait for one transaction, as many callers make them.
_AT_ONCE = 64


@dataclass(frozen=True)
class Stored:
    """What a database took."""

    bytes_of_run: float
    rows_of_run: float
    runs_a_second: float
    grown_again: float
    """Bytes of the database after half of the runs were deleted and as many written, over those
    before: about 1 where the room is used again."""
    deleted_a_second: float


@cache
def _book() -> str:
    return "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))


def text(draw: random.Random, tokens: int) -> str:
    """A piece of the documentation of about so many tokens."""
    begin = draw.randrange(len(_book()) - tokens * _CHARACTERS)
    return _book()[begin : begin + tokens * _CHARACTERS]


def run_of(name: str, load: Workload) -> tuple[Trajectory, list[CallRecord]]:
    """A run and its calls: one conversation, each call with all that was said before."""
    draw = random.Random(name)
    tools = [_tool(draw, number) for number in range(5)]
    prompt = draw.choices(range(_VOCABULARY), k=load.first_prompt)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text(draw, load.first_prompt - 700)},
        {"role": "user", "content": text(draw, 200)},
    ]
    records: list[CallRecord] = []
    for index in range(load.calls):
        call = {"name": "search", "arguments": f'{{"query": "{draw.getrandbits(64)}"}}'}
        reply = {
            "role": "assistant",
            "content": text(draw, load.reply - 30),
            "tool_calls": [{"id": f"call_{index}", "type": "function", "function": call}],
        }
        sampled = draw.choices(range(_VOCABULARY), k=load.reply)
        records.append(
            CallRecord(
                id=f"chatcmpl-{draw.getrandbits(128):032x}",
                created_at=1.7e9 + index,
                policy="my-agent",
                version=3,
                model="my-agent@3",
                tags=CallTags(trajectory_id=name, node="agent", step=index),
                request={"messages": list(messages), "tools": tools, "temperature": 1.0},
                reply=reply,
                prompt_token_ids=list(prompt),
                token_ids=sampled,
                logprobs=[-draw.expovariate(2.0) for _ in sampled],
                temperature=1.0,
                finish_reason="tool_calls",
                excluded_because=None,
                latency=2.5,
                began=index,
            )
        )
        result = text(draw, load.tool_result)
        messages += [reply, {"role": "tool", "tool_call_id": f"call_{index}", "content": result}]
        prompt += [*sampled, *draw.choices(range(_VOCABULARY), k=load.tool_result)]
    return _trajectory(name, records), records


def _tool(draw: random.Random, number: int) -> dict[str, Any]:
    about = {"description": text(draw, 60), "type": "string"}
    parameters = {"type": "object", "properties": {"query": about}, "required": ["query"]}
    function = {"name": f"tool_{number}", "description": text(draw, 30), "parameters": parameters}
    return {"type": "function", "function": function}


def _trajectory(name: str, records: Sequence[CallRecord]) -> Trajectory:
    """As the client posts it: a turn that goes on from another has the new messages alone."""
    turns: list[Turn] = []
    for index, one in enumerate(records):
        said = one.request["messages"]
        turns.append(
            Turn(
                call_id=one.id,
                node="agent",
                model=one.model,
                extends=index - 1 if index else None,
                messages=tuple(said[-1:] if index else said),
                reply=one.reply,
                usage=Usage(
                    prompt_tokens=len(one.prompt_token_ids), completion_tokens=len(one.token_ids)
                ),
                started_at=one.created_at,
                latency=one.latency,
            )
        )
    return Trajectory(id=name, scenario="s-1", turns=tuple(turns), reward=0.5)


def _rows(store: Store) -> int:
    with store.engine.connect() as connection:
        tables = [one for one in META.tables.values() if not one.name.startswith("art_")]
        counts = [sa.select(sa.func.count()).select_from(one) for one in tables]
        return sum(connection.execute(one).scalar_one() for one in counts)


def _file_bytes(store: Store) -> int:
    """With free pages, and PostgreSQL's dead rows: what the disk has to hold."""
    with store.engine.connect() as connection:
        if store.engine.dialect.name == "postgresql":
            size = sa.text("SELECT pg_database_size(current_database())")
            return int(connection.execute(size).scalar_one())
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        return pages * connection.exec_driver_sql("PRAGMA page_size").scalar_one()


def _parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), _AT_ONCE):
        yield items[begin : begin + _AT_ONCE]


async def _write(store: Store, made: Sequence[tuple[Trajectory, list[CallRecord]]]) -> float:
    """Calls one by one, of many callers at once, then their runs by groups; returns seconds."""
    begun = time.monotonic()
    for part in _parts([record for _, records in made for record in records]):
        await asyncio.gather(*(store.add_calls([record]) for record in part))
    for part in _parts([run for run, _ in made]):
        await store.add_trajectories(list(part))
    return time.monotonic() - begun


async def measure(url: str, load: Workload, runs: int) -> Stored:
    """Write `runs` into a new database, delete half of them, write as many again."""
    store = Store(url)
    try:
        empty, rows = _file_bytes(store), _rows(store)
        made = [run_of(f"run-{n}", load) for n in range(runs)]
        seconds = await _write(store, made)
        full, per_run = _file_bytes(store), (_rows(store) - rows) / runs
        begun = time.monotonic()
        for run, _ in made[: runs // 2]:
            await store.delete_trajectory(run.id)
        deleting = time.monotonic() - begun
        if store.engine.dialect.name == "postgresql":  # as autovacuum does it by itself, later
            with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as one:
                one.exec_driver_sql("VACUUM")
        await _write(store, [run_of(f"again-{n}", load) for n in range(runs // 2)])
        return Stored(
            bytes_of_run=(full - empty) / runs,
            rows_of_run=per_run,
            runs_a_second=runs / seconds,
            grown_again=_file_bytes(store) / full,
            deleted_a_second=runs // 2 / deleting,
        )
    finally:
        store.close()
