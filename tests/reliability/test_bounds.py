"""Whatever the server keeps for its clients has a bound: each table, each container in memory.

A new table or container fails here until its bound is said.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from langchain_art.errors import NotFound
from langchain_art_server.gateway.app import create_app
from langchain_art_server.gateway.http_protocol import DeadlineHttp
from langchain_art_server.page.routes import page_routes
from langchain_art_server.storage.tables import META
from tests.support.stored_step import steps

KINDS = (dict, list, set, deque, weakref.WeakValueDictionary, weakref.WeakSet)
OF_POLICIES = "`max_policies`, and their versions that are kept"
OF_CALLS = "the calls that run: `max_running_calls` of each tenant"
OF_CODE = "the server's code"
#: Of each table: what limits its rows. Rows count to `stored_bytes` of the key that adds them.
TABLES = {
    "calls": "`stored_bytes`, `retention`",
    "images": "rows of their calls",
    "call_images": "rows of their calls",
    "trajectories": "`stored_bytes`, `retention`",
    "run_calls": "rows of their runs",
    "run_facts": "rows of their runs",
    "run_marks": "rows of their runs",
    "trained": "rows of their runs",
    "trained_calls": "rows of their runs",
    "policies": "`max_policies`",
    "checkpoints": OF_POLICIES,
    "jobs": "`stored_bytes`",
    "job_events": "a job's steps",
    "reviews": "`stored_bytes`",
    "trained_verdicts": "rows of their reviews",
    "held_out_scenarios": "scenarios of stored runs",
    "rollbacks": "pairs of versions of a policy",
    "api_keys": "only an administrator makes keys",
    "actions": "10,000 entries of a tenant, of 500 bytes",
    "rollouts": "`MAX_HELD`, whole batches end after 600 s without their owner",
    "rollout_batches": "rows of their rollouts",
    "workers": "forgotten 600 s after they were heard",
    "policy_leases": "`max_policies`",
    "art_schema": "one row",
}
#: Of each container that lives as long as the server or a tenant's part of it.
CONTAINERS = {
    "AccessControl._at_once": "clients with a request that runs",
    "CallSlots._of": OF_CALLS,
    "CallSlots._seen": "256 clients",
    "CallSlots._waiting": "1,024 clients, for 5 s",
    "CreditReader._known": "the last jobs that were asked for",
    "DeadlineHttp._by_address": "4,096 connections",
    "EngineProgram._config": "the configuration",
    "EngineProgram._env": "the configuration",
    "RunList._evaluated": "stored evaluations",
    "Health._engines": OF_CODE,
    "Health._probed": OF_CODE,
    "Live._events": "a deque with maxlen",
    "Metrics._calls": OF_POLICIES,
    "Metrics._of_step": OF_CODE,
    "Metrics._routes": "routes, methods and statuses",
    "PageFiles.all_directories": "the page's one folder",
    "PoisonRequests._deaths": "`_MAX_KNOWN` deaths",
    "PolicyLeases._locks": "policies that are being changed",
    "PolicyLeases._tokens": OF_POLICIES,
    "RequestBodies._free_at": "clients whose turn is still to come",
    "RequestBodies._unfinished": "connections",
    "Router._loaded": OF_POLICIES,
    "Router._loading": OF_POLICIES,
    "Router._users": OF_CALLS,
    "Router.serving": "`max_policies`",
    "Service._watch": OF_CODE,
    "SharedAnswers._asked": "answers that are being made",
    "Store._waiting": "records of calls that run",
    "Tenants._apps": "tenants with a key, which an administrator makes",
    "Tenants._services": "tenants with a key, which an administrator makes",
    "TransformersSampler._adapters": OF_POLICIES,
    "TransformersSampler._damaged": OF_POLICIES,
    "TransformersSampler._pending": OF_CALLS,
    "TransformersSampler._unsent": OF_CALLS,
    "Turns._free_at": "clients whose turn is still to come",
    "Turns._reading": "clients that read now",
    "WrongKeys._peers": "4,096 addresses",
    "get_document:made": "one document",
}


def attributes(one: object) -> Iterator[tuple[str, object]]:
    yield from getattr(one, "__dict__", {}).items()
    for kind in type(one).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(one, name):
                yield name, getattr(one, name)


def is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "langchain_art_server"


def containers(roots: Iterable[object]) -> set[str]:
    """Names of the containers that our objects hold, from `roots` on."""
    found, seen, left = set[str](), set[int](), list(roots)
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | BaseModel):
            continue
        seen.add(id(one))
        module, named = type(one).__module__, list[tuple[str, object]]()
        if isinstance(one, FunctionType):
            cells = zip(one.__code__.co_freevars, one.__closure__ or (), strict=True)
            values = [(f"{one.__name__}:{name}", cell.cell_contents) for name, cell in cells]
            named, module = values, one.__module__
        elif isinstance(one, MethodType):
            left += [one.__self__, one.__func__]
        elif isinstance(one, dict | weakref.WeakValueDictionary):
            left += list[Any](one.values())
        elif isinstance(one, list | tuple | set | deque):
            left += list[Any](one)
        elif is_ours(module):
            named = [(f"{type(one).__name__}.{name}", held) for name, held in attributes(one)]
            named += [
                (f"{type(one).__name__}.{name}", held)
                for name, held in vars(type(one)).items()
                if isinstance(held, KINDS) and not name.startswith("__")
            ]
        elif module.partition(".")[0] in {"fastapi", "starlette"}:
            left += [held for _, held in attributes(one)]
        if is_ours(module):
            found |= {name for name, held in named if isinstance(held, KINDS)}
        left += [held for _, held in named]
    return found


def test_each_table_has_a_bound() -> None:
    assert {table.name for table in META.sorted_tables} == set(TABLES)


@pytest.mark.slow
async def test_each_container_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data := tmp_path / "data").mkdir()
    async with steps(data, tmp_path, monkeypatch) as made, made.service(data) as service:
        app = create_app(service, page_routes)
        connection = DeadlineHttp.__new__(DeadlineHttp)
        assert containers([app, service, connection]) == set(CONTAINERS)
        for number in range(20):  # names that nobody has are not kept
            with pytest.raises(NotFound):
                await service.policies.rollback(f"nobody-{number}", 1)
        assert not service.store.leases._locks
