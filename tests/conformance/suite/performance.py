"""How a topology's program is run, and what is known of the run: `perform`, `Performance`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import NotFound
from langchain_art.tracing.run import Run
from langchain_art.tracing.scope import capture
from langchain_art.wire import Trajectory
from tests.conformance.suite.harness import (
    Kit,
    Mode,
    Program,
    RunStep,
    Served,
    Topology,
    without_loop,
)
from tests.conformance.suite.outcomes import NotHeld, holds, leaves
from tests.conformance.suite.witness import Witness, Witnessed


async def _drive(program: Program) -> None:
    """Runs a program's steps. Awaits only what is awaitable: synchronous ones need no loop."""
    step = next(program, None)
    while step is not None:
        try:
            result = step()
            if inspect.isawaitable(result):
                result = await result
        except BaseException as error:  # noqa: BLE001 - the program may expect it
            step = _sent(program.throw, error)
        else:
            step = _sent(program.send, result)


def _sent(send: Callable[[Any], RunStep], value: Any) -> RunStep | None:
    try:
        return send(value)
    except StopIteration:
        return None


async def _run(case: Topology, kit: Kit) -> Run:
    ends = leaves(case.raises) if case.raises else nullcontext()
    if case.heard != "scope":
        with ends:
            await _drive(case.program(kit))
        return kit.handler.run
    with ends, capture(scenario=case.name, id=kit.handler.run.id) as run:
        await _drive(case.program(kit))
    return run


@dataclass(frozen=True)
class Performance:
    """One run of a program and the two records of it: the trajectory, and what was witnessed."""

    case: Topology
    trajectory: Trajectory
    witnessed: dict[str, Witnessed]
    """call id -> what the witness saw, for every call that ended while the program ran."""
    thread: str
    client: ArtClient
    _records: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def record(self, call_id: str) -> dict[str, Any]:
        """What the server wrote down of a call. Raises NotHeld if it knows no such call."""
        if call_id not in self._records:
            try:
                self._records[call_id] = self.client.call(call_id)
            except NotFound as error:
                raise NotHeld(
                    f"the server answered the call {call_id}, and has no record of it: {error}"
                ) from error
        return self._records[call_id]

    def reply(self, call_id: str) -> dict[str, Any]:
        """What a call answered: by the witness, or else by the server's record."""
        seen = self.witnessed[call_id].reply
        return self.record(call_id)["reply"] if seen is None else seen


def perform(
    case: Topology,
    mode: Mode,
    served: Served,
    witness: Witness,
    client: ArtClient,
    *,
    number: int = 0,
) -> Performance:
    """Runs a program once, in a mode; `number` is its place in its group, and its reward.

    Raises `NotHeld` if one call's id was given to two calls, and what the program raises.
    """
    kit = Kit(served, mode, number, threaded=case.threaded)
    witness.calls()  # those before this run
    running = _run(case, kit)
    run = asyncio.run(running) if kit.asynchronous else without_loop(running)
    if case.heard == "server":
        trajectory = client.reward(run.id, float(number))
    else:
        run.reward = float(number)
        trajectory = run.trajectory()
    calls = witness.calls()
    witnessed = {call.id: call for call in calls}
    holds(len(witnessed) == len(calls), f"an id was given twice: {[call.id for call in calls]}")
    return Performance(case, trajectory, witnessed, kit.thread, client)
