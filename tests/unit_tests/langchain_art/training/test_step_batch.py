import asyncio
import io
from collections import Counter
from pathlib import Path

from rich.console import Console

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.rollout.scenarios import draw
from langchain_art.training.fit_state import History
from langchain_art.training.progress import Display
from langchain_art.training.records import BatchFacts
from langchain_art.training.run_setup import Setup
from langchain_art.training.step_batch import StepBatchBuilder
from tests.support.fits import identity, record, settings


async def test_a_fit_that_ran_ahead_goes_on_with_the_scenarios_that_it_left(tmp_path: Path) -> None:
    """Each epoch has each scenario once, though the slowest never end before a stop."""
    plan = settings(group_size=2, groups_per_step=2, concurrency=None, max_steps_ahead=2)
    scenarios = [{"id": str(n)} for n in range(8)]
    slow, held = [draw(scenarios, place, 0) for place in (0, 3)], asyncio.Event()

    async def rollout(scenario: dict[str, str]) -> float:
        if scenario in slow:
            await held.wait()
        return 1.0

    drawn: list[str | None] = []
    async with AsyncArtClient("http://127.0.0.1:9/v1") as client:  # which is not asked
        setup = Setup(plan, client, Display(Console(file=io.StringIO())), rollout)
        for step in range(1, 5):
            history = History(tmp_path, identity())
            history.save(learning_rate={"p": 1e-5})
            batches = StepBatchBuilder(setup, history, scenarios, 4)
            if step == 3:
                held.set()
            async with batches.stream:
                batch = await batches.collect(step)
            drawn += [run.scenario for group in batch.groups for run in group.trajectories]
            if step == 2:
                continue  # stopped while it was trained: it is pending
            facts = {name: getattr(batch, name) for name in BatchFacts.model_fields}
            history.append(record(step, step).model_copy(update=facts))
    assert Counter(drawn) == {one["id"]: 2 for one in scenarios}
    assert {one["id"] for one in slow}.isdisjoint(drawn[:8])
