import asyncio
import io
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.rollout.scenarios import draw
from langchain_art.training.fit_state import FIT, HISTORY, History, alone
from langchain_art.training.fits import chosen_fits, compare_fits, latest_of, read_fits
from langchain_art.training.progress import Display
from langchain_art.training.records import BatchFacts
from langchain_art.training.run_setup import Setup
from langchain_art.training.step_batch import StepBatchBuilder
from tests.support.fits import identity, record, settings, write_fit


def test_fits_are_read_from_their_folders(tmp_path: Path) -> None:
    write_fit(tmp_path / "slow", [0.1, 0.2], {0: 0.1, 2: 0.3})
    write_fit(tmp_path / "fast", [0.1, 0.6], {0: 0.1, 1: 0.9, 2: 0.4}, steps=5, seed=1)
    write_fit(tmp_path / "in" / "deep", [0.25])
    (tmp_path / "fast" / "history.jsonl").open("a").write('{"kind": "st')  # being written
    fits = {fit.name: fit for fit in read_fits(tmp_path)}
    assert set(fits) == {"slow", "fast", "in/deep"}
    slow, fast, deep = fits["slow"], fits["fast"], fits["in/deep"]
    assert (slow.finished, slow.done, slow.best, slow.use) == (True, 2, (2, 0.3), "p@2")
    assert (fast.finished, fast.done, fast.best, fast.use) == (False, 2, (1, 0.9), "p@1")
    assert (deep.held_out, deep.rewards, deep.use) == (False, [(1, 0.25)], "p@1")
    assert [fit.name for fit in chosen_fits(tmp_path, ["fast", "slow"])] == ["fast", "slow"]
    found = latest_of(tmp_path, "p")
    assert found is not None and found.at == max(fit.at for fit in fits.values())
    assert latest_of(tmp_path, "q") is None
    [whole] = chosen_fits(tmp_path / "in", [f"{tmp_path}/slow"])
    assert whole.name == f"{tmp_path}/slow"
    with pytest.raises(ConfigError, match=r"got the fit 'b', expected one of those below .*: "):
        chosen_fits(tmp_path, ["b"])
    History(tmp_path / "begun", identity()).save(began_with={"p": 3})
    with pytest.raises(ConfigError, match=r"0 steps, p@3\)"):
        History(tmp_path / "begun", identity(seed=1))
    assert chosen_fits(tmp_path, ["begun"])[0].use == "p@3"


def test_what_a_fresh_fit_moved_aside_is_found_by_its_name_alone(tmp_path: Path) -> None:
    old = write_fit(tmp_path / "a", [0.1])
    History(tmp_path / "a", identity(), fresh=True)
    assert [fit.name for fit in read_fits(tmp_path)] == ["a"]
    [moved] = chosen_fits(tmp_path, [f"a/earlier/{old.state.fit_id}"])
    assert moved.done == 1


@pytest.mark.parametrize("fresh", [False, True])
def test_lines_whose_fit_was_deleted_are_of_no_fit(tmp_path: Path, fresh: bool) -> None:
    write_fit(tmp_path, [0.1, 0.2])
    (tmp_path / FIT).write_text("{}")
    with pytest.raises(ConfigError, match="Delete it"):
        History(tmp_path, identity(), fresh=fresh)
    (tmp_path / FIT).unlink()
    begun = History(tmp_path, identity(seed=1), fresh=fresh)
    assert (begun.done, begun.resumed, begun.versions) == (0, False, {})
    [kept] = (tmp_path / "earlier").rglob(HISTORY)
    assert len(kept.read_text().splitlines()) == 2


def test_a_fit_runs_once_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_fit(folder, [0.1], steps=2)

    def told() -> str:
        [fit] = read_fits(tmp_path)
        return fit.words

    assert told() == "stopped"
    with alone(folder):
        assert told() == "running"
        with pytest.raises(ConfigError, match="Another process"), alone(folder):
            pass
    with alone(folder):
        pass
    assert told() == "stopped"


def test_fits_of_other_numbers_of_policies_differ_in_them(tmp_path: Path) -> None:
    write_fit(tmp_path / "one", [0.1])
    both = History(tmp_path / "two", identity(policies=("p", "q")))
    step = record(1, 1, 0.1)
    trained = step.results["p"]
    both.append(step.model_copy(update={"results": {"p": trained, "q": trained}}))
    with ArtClient("http://127.0.0.1:9/v1") as client:  # which is not asked for anything
        found = compare_fits(*chosen_fits(tmp_path, ["one", "two"]), client)
    assert found.first == "step 1, policies trained: 1 and 2"


def test_a_fit_that_cannot_be_read_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "another program's", "torn"):
        write_fit(tmp_path / name, [0.1])
    (tmp_path / "another program's" / FIT).write_text('{"loss": 0.1}')
    (tmp_path / "torn" / HISTORY).write_text('{"kind": "later"}\n')
    assert [fit.name for fit in read_fits(tmp_path)] == ["a"]
    assert all(f"{tmp_path / name}" in caplog.text for name in ("another program's", "torn"))
    found = latest_of(tmp_path, "p")
    assert found is not None and found.name == "a"
    with pytest.raises(ConfigError, match="line 1 is not a record of a fit"):
        chosen_fits(tmp_path, ["torn"])
    with pytest.raises(ConfigError, match="There is no fit below"):
        chosen_fits(tmp_path / "none", [])


# --- a fit that ran ahead -------------------------------------------------------------------------


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
