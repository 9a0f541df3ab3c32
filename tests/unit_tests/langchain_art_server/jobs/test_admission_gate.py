"""While the learner has the device calls wait, none is lost, and too many are told when to come."""

import asyncio

import pytest

from langchain_art_server.jobs.admission_gate import AdmissionGate


async def test_shut_it_waits_for_who_is_inside_and_who_comes_waits_for_it() -> None:
    gate, told, leave = AdmissionGate(8), list[str](), asyncio.Event()

    async def early() -> None:
        async with gate.through():
            await leave.wait()
            told.append("early is done")

    async def step() -> None:
        async with gate.shut():
            told.append("the step begins")
            await asyncio.sleep(0.02)
            told.append("the step ends")

    async def late() -> None:
        async with gate.through():
            told.append("late goes")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(early())
        await asyncio.sleep(0)
        tasks.create_task(step())
        await asyncio.sleep(0)
        tasks.create_task(late())
        await asyncio.sleep(0.01)
        assert told == []
        leave.set()
    assert told == ["early is done", "the step begins", "the step ends", "late goes"]


async def test_who_gives_up_makes_room_and_a_failed_step_opens_it() -> None:
    gate = AdmissionGate(1)
    with pytest.raises(ZeroDivisionError):
        async with gate.shut():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), gate.through():
                    pass
            waiting = asyncio.create_task(_pass(gate))
            await asyncio.sleep(0.01)
            raise ZeroDivisionError
    await asyncio.wait_for(waiting, 30)


async def _pass(gate: AdmissionGate) -> None:
    async with gate.through():
        pass
