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
#: What limits the rows of tables, which count to `stored_bytes` of the key that adds them.
TABLES = {
    "`stored_bytes`, `retention`": "calls trajectories",
    "`stored_bytes`": "jobs reviews",
    "rows of their calls": "images call_images",
    "rows of their runs": "run_calls run_facts run_marks trained trained_calls",
    "rows of their reviews": "trained_verdicts",
    "rows of their rollouts": "rollout_batches",
    "scenarios of stored runs": "held_out_scenarios",
    "a job's steps": "job_events",
    "`max_policies`": "policies policy_leases",
    "`max_policies`, and their versions that are kept": "checkpoints",
    "pairs of versions of a policy": "rollbacks",
    "only an administrator makes keys": "api_keys",
    "10,000 entries of a tenant, of 500 bytes": "actions",
    "`MAX_HELD`, whole batches end after 600 s without their owner": "rollouts",
    "forgotten 600 s after they were heard": "workers",
    "one row": "art_schema",
}
#: And containers that live as long as the server or a tenant's part of it.
CONTAINERS = {
    "the server's code": "Health._engines Health._probed Metrics._of_step Service._watch",
    "the configuration": "EngineProgram._config EngineProgram._env",
    "`max_policies`": "Router.serving",
    "`max_policies`, and their versions that are kept": (
        "Metrics._calls PolicyLeases._tokens Router._loaded Router._loading "
        "TransformersSampler._adapters TransformersSampler._damaged"
    ),
    "the calls that run: `max_running_calls` of each tenant": (
        "CallSlots._of Router._users Store._waiting TransformersSampler._pending "
        "TransformersSampler._unsent"
    ),
    "clients with a request that runs": "AccessControl._at_once",
    "256 clients": "CallSlots._seen",
    "1,024 clients, for 5 s": "CallSlots._waiting",
    "clients whose turn is still to come": "RequestBodies._free_at Turns._free_at",
    "clients that read now": "Turns._reading",
    "connections": "RequestBodies._unfinished",
    "4,096 connections": "DeadlineHttp._by_address",
    "4,096 addresses": "WrongKeys._peers",
    "tenants with a key, which an administrator makes": "Tenants._apps Tenants._services",
    "the last jobs that were asked for": "CreditReader._known",
    "stored evaluations": "RunList._evaluated",
    "a deque with maxlen": "Live._events",
    "routes, methods and statuses": "Metrics._routes",
    "the page's one folder": "PageFiles.all_directories",
    "`_MAX_KNOWN` deaths": "PoisonRequests._deaths",
    "policies that are being changed": "PolicyLeases._locks",
    "answers that are being made": "SharedAnswers._asked",
    "one document": "get_document:made",
}


def all_of(bounds: dict[str, str]) -> set[str]:
    return {name for names in bounds.values() for name in names.split()}


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
    assert {table.name for table in META.sorted_tables} == all_of(TABLES)


@pytest.mark.slow
async def test_each_container_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data := tmp_path / "data").mkdir()
    async with steps(data, tmp_path, monkeypatch) as made, made.service(data) as service:
        app = create_app(service, page_routes)
        connection = DeadlineHttp.__new__(DeadlineHttp)
        assert containers([app, service, connection]) == all_of(CONTAINERS)
        for number in range(20):  # names that nobody has are not kept
            with pytest.raises(NotFound):
                await service.policies.rollback(f"nobody-{number}", 1)
        assert not service.store.leases._locks
