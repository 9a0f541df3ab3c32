import asyncio
import json
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from langchain_art.cli import main
from langchain_art.cli.export import export_adapter
from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ArtError, ConfigError, Conflict
from langchain_art.evaluators import score_groups
from langchain_art.tracing.run import Run
from langchain_art.tracing.scope import capture
from langchain_art.training.fit_settings import Schedule
from langchain_art.training.fit_state import History
from langchain_art.training.fits import read_fits
from langchain_art.training.records import StepRecord, best_of_evals, summarize
from langchain_art.training.report import summary_table
from langchain_art.training.trainer import Trainer
from langchain_art.wire import (
    ID,
    LRSchedule,
    TrainConfig,
    Trajectory,
    TrajectoryGroup,
    default_learning_rate,
)
from tests.support.chat_models import model_of
from tests.support.fits import evaluation, identity, record
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import SMALL, Heard, asking, said, trainer_of


def run(name: str, reward: float | None, scenario: str = "s", **more: Any) -> Trajectory:
    return Trajectory(id=name, scenario=scenario, reward=reward, **more)


def group(name: str, *runs: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(id=name, trajectories=runs)


@pytest.mark.parametrize(("every", "due"), [(None, [0, 10]), (4, [0, 4, 8, 10])])
@pytest.mark.parametrize(("per_step", "per_eval"), [(10.0, 60.0), (60.0, 1.0)])
def test_the_time_left_of_equal_steps_is_known_from_the_second_on_with_evaluations_to_come(
    every: int | None, due: list[int], per_step: float, per_eval: float
) -> None:
    schedule = Schedule(10, ["x"], every)
    assert [step for step in range(11) if schedule.evaluates(step)] == due
    for resumed_after in (0, 4):
        elapsed, evals = per_eval, [per_eval]  # before the first step, perhaps of a former call
        for step in range(resumed_after + 1, 11):
            elapsed += per_step
            left = schedule.seconds_left(step, step - resumed_after, elapsed, evals)
            to_come = [one for one in range(step, 11) if schedule.evaluates(one)]
            truth = per_step * (10 - step) + per_eval * len(to_come)
            assert left == pytest.approx(truth, rel=1 / 3)
            if schedule.evaluates(step):
                elapsed, evals = elapsed + per_eval, [*evals, per_eval]


async def test_failed_runs_are_not_shown_and_not_scored() -> None:
    failed, punished = (run("f", reward, status="failed", error="x") for reward in (None, -1.0))
    for first, expected in ((failed, [None, 0.25]), (punished, [-1.0, 0.25])):
        mixed = group("m", first, run("ok", None))
        found = await score_groups([mixed], lambda judged: [0.25] * len(judged.trajectories))
        assert [t.reward for t in found.groups[0].trajectories] == expected
    alone = group("n", failed)
    found = await score_groups([alone], lambda _: [])
    assert found.groups == [alone]

    for scores in ([1.0], "x", 7, group("b", run("c", 1.0))):
        with pytest.raises(ConfigError, match="evaluator returned"):
            two: Any = group("a", run("a", None), run("b", None))
            await score_groups([two], lambda _, scores=scores: scores)


@pytest.mark.parametrize("odd", ["\u2028", "\x85"])
def test_a_line_ends_at_its_line_feed_and_one_that_is_torn_never_happened(
    odd: str, tmp_path: Path
) -> None:
    told = summarize([run("r", 1.0, f"a{odd}b")], step=0, versions=["p@0"], seconds=0.0)
    History(tmp_path, identity()).append(told)
    path = tmp_path / "history.jsonl"
    line = path.read_bytes()
    path.write_bytes(line + line[: line.index(odd.encode()) + 1])
    again = History(tmp_path, identity())
    assert [one.scenarios for one in again.evals] == [{f"a{odd}b": 1.0}]
    assert path.read_bytes() == line
    again.append(record(1, 1))
    assert History(tmp_path, identity()).done == 1
    path.write_text("nonsense\n")
    with pytest.raises(ConfigError, match="line 1"):
        History(tmp_path, identity())


def test_a_steps_key_is_one_whatever_the_folder_is_named(tmp_path: Path) -> None:
    for name in ("x" * 128, "r@1:a", "_", "é", "..a"):
        state = History(tmp_path / name, identity()).state
        key = state.model_copy(update={"failed_jobs": {99_999: 98}}).key("p" * 64, 99_999)
        assert ID.fullmatch(key), key
    older = state.model_copy(update={"name": ""})  # of a fit that another release began
    assert older.key("p", 3) == f"{state.fit_id}:p:step:3"


async def test_trainer_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a ChatART"):
        Trainer(object())  # pyright: ignore[reportArgumentType]
    trainer = Trainer("p@3", out_dir=tmp_path / "fit")
    with pytest.raises(ConfigError, match="never changes"):
        await trainer.fit(lambda _: 1.0, ["x"], steps=1)
    with pytest.raises(ConfigError, match=r"await trainer\.fit"):
        trainer.fit_sync(lambda _: 1.0, ["x"], steps=1)
    with pytest.raises(ConfigError, match="got on_step='wandb', expected a function of a step's"):
        await Trainer("p", out_dir=tmp_path / "fit").fit(
            lambda _: 1.0,
            ["a"],
            steps=1,
            on_step="wandb",  # pyright: ignore[reportArgumentType]
        )
    assert not (tmp_path / "fit").exists()


# --- against the real server ------------------------------------------------------------------

SCENARIOS = [{"id": f"q-{i}", "question": f"Say {i}"} for i in range(4)]


def spread(run: Run, text: str) -> float:
    """A toy reward that hardly two replies share."""
    return (sum(f"{text}{run.turns[-1].reply}{run.id}".encode()) % 97) / 97


def rollout_of(server: LiveServer, trainer: Trainer, calls: list[str] | None = None) -> Any:
    """A rollout that asks the trainer's policy; the scenarios that it was called with."""
    asks = asking(spread, model_of(server, trainer.policy))

    async def rollout(scenario: dict[str, str]) -> Run:
        if calls is not None:
            calls.append(scenario["id"])
        return await asks(scenario)

    return rollout


def client_of(server: LiveServer) -> ArtClient:
    return ArtClient(server.base_url, server.api_key)


@pytest.mark.parametrize(
    ("reward", "held_out", "words"),
    [
        (0.0, True, "No run of 8 was rewarded: warm-start"),
        (1.0, False, "Every run of 8 has the full reward: take harder"),
    ],
)
def test_a_base_that_fares_alike_everywhere_is_told_of_before_the_first_step(
    art_server: LiveServer, tmp_path: Path, reward: float, held_out: bool, words: str
) -> None:
    trainer = trainer_of(art_server, tmp_path)
    rollout = asking(lambda *_: reward, model_of(art_server, trainer.policy, max_tokens=2))
    scenarios = [{"id": f"{number}", "question": f"{number}"} for number in range(8)]
    trainer.fit_sync(rollout, scenarios, steps=2, eval_scenarios=scenarios if held_out else ())
    shown = said(trainer)
    assert shown.count(words) == 1, shown
    assert shown.index(words) < shown.index("step 1/2"), shown
    if held_out:
        for worth in (0.0, 0.5):
            trainer.evaluate_sync(lambda _, worth=worth: worth, scenarios[:4], samples=2)
        assert said(trainer).count(words) == 2


async def test_fit_trains_and_tells_and_a_longer_one_goes_on(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first fit is told in numpy's integers and arrays; the last one cannot pin."""
    one, two, four = map(np.int64, (1, 2, 4))
    first = trainer_of(art_server, tmp_path, seed=one, group_size=four, groups_per_step=two)
    policy = first.policy
    evaluations: dict[str, Any] = {"eval_scenarios": SCENARIOS[:2], "eval_samples": 2}
    numbers: dict[str, Any] = {"steps": one, "eval_every": one, "eval_samples": two}
    numbers["eval_scenarios"] = np.array(SCENARIOS[:2])
    await first.fit(rollout_of(art_server, first), np.array(SCENARIOS), **numbers)  # pyright: ignore[reportArgumentType]

    again = trainer_of(art_server, tmp_path, policy, seed=1)
    calls: list[str] = []
    with monkeypatch.context() as patch:  # it needs no server to say so
        patch.setattr("langchain_art.client.async_client.AsyncArtClient.ready", None)
        rollout = rollout_of(art_server, again, calls)
        same = await again.fit(rollout, SCENARIOS, steps=1, eval_every=1, **evaluations)
    assert (calls, same.version) == ([], 1)
    assert "Finished already: 1 steps" in said(again)

    found = await again.fit(rollout, SCENARIOS, steps=2, eval_every=1, **evaluations)
    assert len(calls) == 8 + 4
    assert found.adapter == f"{policy}@2"
    assert [step.version for step in found.history] == [1, 2]
    assert [e.version for e in found.evals] == [f"{policy}@{n}" for n in range(3)]
    assert found.before is not None and found.after is not None
    assert (found.before.n, found.after.step) == (4, 2)
    for step in found.history:
        assert {"rollout", "train", "total"} <= step.seconds.keys()
        assert step.metrics
        assert step.tokens["completion"] > 0
    assert found.best is not None
    with client_of(art_server) as client:
        pinned = [c.name for c in client.checkpoints(policy) if c.pinned]
    assert pinned == list(dict.fromkeys([found.best.version, found.adapter]))
    shown = Heard()
    shown.print(summary_table(found))
    assert found.adapter in shown.said

    async def full(*_: Any) -> None:
        raise Conflict("32 versions are pinned")

    monkeypatch.setattr(AsyncArtClient, "pin", full)
    found = await again.fit(rollout, SCENARIOS, steps=3, eval_every=1, **evaluations)
    assert found.adapter == f"{policy}@3"
    assert said(again).count("32 versions are pinned") == 1


async def test_what_a_fit_ended_on_outlives_the_fits_after_it(
    art_server: LiveServer, tmp_path: Path
) -> None:
    """Also one that an error ended; `fits` recommends what the server keeps. Two pins a fit."""
    policy = new_id("p")
    client = client_of(art_server)

    def pinned() -> list[int]:
        return [one.version for one in client.checkpoints(policy) if one.pinned]

    async def fit(folder: str, steps: int, **options: Any) -> None:
        small = {"group_size": 2, "groups_per_step": 1}
        trainer = trainer_of(art_server, tmp_path / folder, policy, **small)
        await trainer.fit(rollout_of(art_server, trainer), SCENARIOS, steps=steps, **options)

    def fail(record: StepRecord) -> None:
        if record.step == 2:
            raise ValueError("enough")

    with client:
        with pytest.raises(ValueError, match="enough"):
            await fit("stopped", 5, on_step=fail)
        await fit("next", 2)
        await fit("next", 3)  # goes on: what it had ended on before is not kept for it
        assert pinned() == [2, 5]
        export_adapter(client, policy, 2, tmp_path / "adapter")
        kept = {one.name for one in client.checkpoints(policy)}
        assert {one.use for one in read_fits(tmp_path)} == {f"{policy}@2", f"{policy}@5"} < kept
        command = ["export", f"{policy}@4", str(tmp_path / "exported")]
        environment = {"ART_BASE_URL": art_server.base_url, "ART_API_KEY": art_server.api_key}
        assert CliRunner().invoke(main.app, command, env=environment).exit_code == 0
        await fit("next", 1, fresh=True)
        assert pinned() == [2, 4, 6]


async def test_a_learning_rate_that_is_not_named_fits_the_model_and_is_recorded(
    art_server: LiveServer, tmp_path: Path
) -> None:
    trainer = trainer_of(art_server, tmp_path)
    with client_of(art_server) as client:
        parameters = client.status().parameters
        assert 5e4 < parameters < 1e5
        expected = default_learning_rate(parameters, SMALL)
        assert expected == pytest.approx(3.3e-3, rel=0.2), "near what the demo learns with"
        found = await trainer.fit(rollout_of(art_server, trainer), SCENARIOS, steps=1)
        assert found.history[0].metrics["learning_rate"] == pytest.approx(expected)
        chosen = f"learning rate {expected:.2g}, chosen for {parameters / 1e6:.1f} M parameters"
        assert chosen in said(trainer)
        state = json.loads((tmp_path / "fit.json").read_text())
        assert state["learning_rate"] == {trainer.policy: pytest.approx(expected)}
        assert state["identity"]["config"]["learning_rate"] is None
        runs = [one.id for one in client.trajectories(8)]
        job = client.train([runs[:4]], trainer.policy, TrainConfig(), retrain=True)
        assert client.wait(job).metrics["learning_rate"] == pytest.approx(expected)
        supervised = client.wait(client.sft(runs[:2], trainer.policy))
        assert supervised.metrics["learning_rate"] == pytest.approx(5 * expected)
    again = trainer_of(art_server, tmp_path, trainer.policy)
    await again.fit(rollout_of(art_server, trainer), SCENARIOS, steps=1)
    assert "chosen for" not in said(again)


async def test_another_fit_in_the_same_folder_is_refused_and_may_begin_anew(
    art_server: LiveServer, tmp_path: Path
) -> None:
    """The reward is changed, and the same program is run again."""
    first = trainer_of(art_server, tmp_path)
    model = model_of(art_server, first.policy)

    def better(run: Run, text: str) -> float:
        return 1.0 - spread(run, text)

    def program(reward: Any) -> Any:
        async def rollout(scenario: dict[str, str]) -> Run:
            async with capture(scenario=scenario["id"]) as told:
                told.reward = reward(told, (await model.ainvoke(scenario["question"])).text)
            return told

        return rollout

    await first.fit(program(spread), SCENARIOS, steps=2)
    config = TrainConfig(learning_rate=1e-4)
    second = trainer_of(art_server, tmp_path, first.policy, config=config)
    wanted = (
        r"config\.learning_rate None -> 0\.0001.*the rollout's source \(better\); "
        r"scenarios \(4 -> 3\).*fresh=True"
    )
    with pytest.raises(ConfigError, match=wanted):
        await second.fit(program(better), SCENARIOS[:3], steps=2)

    again = await second.fit(program(better), SCENARIOS, steps=1, fresh=True)
    assert again.version == 3, "a name of a version is used once"
    with client_of(art_server) as client:
        made = {one.version: one.parent for one in client.checkpoints(first.policy)}
    assert made[3] == 0, "it begins from the base"
    shown = said(second)
    assert f"{first.policy} is rolled back from @2 to @0" in shown
    assert list((tmp_path / "earlier").iterdir())

    elsewhere = trainer_of(art_server, tmp_path / "new", first.policy)
    assert "are training scenarios too" not in shown
    held_out = [*SCENARIOS[:1], "Is it new?"]
    await elsewhere.fit(program(better), SCENARIOS, steps=0, eval_scenarios=held_out)
    assert "1 of 2 eval_scenarios are training scenarios too" in said(elsewhere)
    assert f"{first.policy} is at @3: this fit goes on from what it has learned." in said(elsewhere)


async def test_a_rolled_back_policy_is_not_taken_for_progress_and_a_fresh_fit_warms_up_anew(
    art_server: LiveServer, tmp_path: Path
) -> None:
    """Versions are numbered on; the schedule of the learning rate begins anew."""
    config = TrainConfig(learning_rate=1e-3, schedule=LRSchedule(warmup_steps=4))
    trainer = trainer_of(art_server, tmp_path, config=config)
    rollout = rollout_of(art_server, trainer)
    first = await trainer.fit(rollout, SCENARIOS, steps=2)
    with client_of(art_server) as client:
        client.rollback(trainer.policy, 0)
    with pytest.raises(ConfigError, match="rolled back"):
        await trainer.fit(rollout, SCENARIOS, steps=3)
    fresh = await trainer.fit(rollout, SCENARIOS, steps=2, fresh=True)
    rates = [[step.metrics["learning_rate"] for step in one.history] for one in (first, fresh)]
    assert rates == [[2.5e-4, 5e-4]] * 2
    assert (first.version, fresh.version) == (2, 4)


async def test_all_runs_of_a_step_are_at_work_at_once(
    art_server: LiveServer, tmp_path: Path
) -> None:
    everybody = asyncio.Barrier(72)

    async def rollout(_: dict[str, str]) -> float:
        async with asyncio.timeout(60):
            await everybody.wait()
        return 1.0

    trainer = trainer_of(art_server, tmp_path, group_size=12, groups_per_step=6)
    [step] = (await trainer.fit(rollout, SCENARIOS, steps=1)).history
    assert step.reward_mean == 1.0, "no run has failed"


def test_a_plain_function_and_a_judge_in_a_plain_program(
    art_server: LiveServer, tmp_path: Path
) -> None:
    def evaluator(judged: TrajectoryGroup) -> Sequence[float]:
        if judged.id.endswith("q-0"):
            raise TimeoutError("judge is away")
        return [i / 10 for i, _ in enumerate(judged.trajectories)]

    trainer = trainer_of(art_server, tmp_path, evaluator=evaluator, groups_per_step=4)
    model = model_of(art_server, trainer.policy)

    def rollout(scenario: dict[str, str]) -> Run:
        with capture(scenario=scenario["id"]) as told:
            model.invoke(scenario["question"])
        return told

    found = trainer.fit_sync(rollout, SCENARIOS, steps=1)
    assert found.excluded["groups.unjudged"] == 1
    assert found.history[0].groups == 3
    assert found.history[0].reward_mean == pytest.approx(0.15)
    assert found.version == 1
    unjudged = trainer_of(art_server, tmp_path / "unjudged", trainer.policy)
    with pytest.raises(ConfigError, match="evaluator="):
        unjudged.fit_sync(rollout, SCENARIOS, steps=1)


async def test_an_evaluation_says_what_failed_and_keeps_the_rest(
    art_server: LiveServer, tmp_path: Path
) -> None:
    is_away = False

    def judge(judged: TrajectoryGroup) -> Sequence[float]:
        if is_away:
            raise TimeoutError("judge is away")
        return [0.0] * len(judged.trajectories)

    trainer = trainer_of(art_server, tmp_path, evaluator=judge)

    async def rollout(scenario: dict[str, str]) -> Run:
        if scenario["id"] == "q-2":
            raise ValueError("no such tool")
        async with capture(scenario=scenario["id"]) as told:
            told.reward = 1.0 if scenario["id"] == "q-0" else None
        return told

    assert (await trainer.evaluate(rollout, SCENARIOS[:2])).mean == 0.5, "its own reward is kept"
    is_away = True
    found = await trainer.evaluate(rollout, SCENARIOS[:3])
    assert (found.mean, found.n, found.failed, found.unscored) == (1.0, 1, 1, 1)
    assert found.ci95 is None
    lines = said(trainer)
    assert "1 rollouts failed; the first: ValueError: no such tool" in lines
    assert "1 groups were not judged: TimeoutError: judge is away" in lines
    with pytest.raises(ArtError, match=r"raised for all 1 groups.*judge is away"):
        await trainer.evaluate(rollout, SCENARIOS[1:2])


# --- rollouts that run ahead of the training, and a hook for each step ---------------------------


@pytest.mark.parametrize("max_steps_ahead", [0, 2])
async def test_how_far_rollouts_run_ahead(
    art_server: LiveServer, tmp_path: Path, max_steps_ahead: int
) -> None:
    # So that runs which are some versions old agree with the learner.
    config, started = TrainConfig(learning_rate=2e-5), 0
    most: dict[int, int] = {}  # steps that were trained when a group began -> groups that had
    options = {"group_size": 2, "config": config, "max_steps_ahead": max_steps_ahead}
    trainer, numbers = trainer_of(art_server, tmp_path / "fit", **options), count()
    inner = asking(lambda *_: float(next(numbers)), model_of(art_server, trainer.policy))
    history = tmp_path / "fit" / "history.jsonl"

    async def rollout(scenario: dict[str, str]) -> Run:
        nonlocal started
        done = len(history.read_text().splitlines()) if history.exists() else 0
        started += 1
        most[done] = started
        return await inner(scenario)

    found = await trainer.fit(rollout, SCENARIOS, steps=4)
    assert [step.version for step in found.history] == [1, 2, 3, 4]
    assert started == 4 * 2 * 2, "no more than the steps need"
    for done, runs in most.items():
        assert runs <= (done + 1 + max_steps_ahead) * 2 * 2
    if max_steps_ahead:
        assert most[0] == (1 + max_steps_ahead) * 2 * 2
        assert max(step.metrics["staleness_mean"] for step in found.history) > 0


def test_what_a_hook_raises_is_loud_and_loses_nothing(
    art_server: LiveServer, tmp_path: Path
) -> None:
    hooked = trainer_of(art_server, tmp_path / "fit", group_size=2, groups_per_step=1)

    def one_point(scenario: str) -> float:
        return 1.0  # no model is called: a step takes no time

    def kept() -> list[int]:
        lines = (hooked.out_dir / "history.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def broken(record: StepRecord) -> None:
        raise KeyError("no such metric")

    with pytest.raises(KeyError) as caught:
        hooked.fit_sync(one_point, ["a", "b"], steps=2, on_step=broken)
    words = f"on_step raised after step 1. The step is trained and kept in {hooked.out_dir}"
    assert words in "".join(traceback.format_exception(caught.value))
    assert words in said(hooked) and "KeyError: 'no such metric'" in said(hooked)
    assert kept() == [1]
    seen: list[StepRecord] = []

    async def note(record: StepRecord) -> None:
        assert kept()[-1] == record.step  # it is on disk by now
        seen.append(record)

    fitted = hooked.fit_sync(one_point, ["a", "b"], steps=2, on_step=note)
    assert tuple(seen) == fitted.history[1:] and kept() == [1, 2]


# --- Ctrl-C: a sentence says what to do, and no traceback hides it --------------------------------


FIT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # below `nohup` it would be ignored
from langchain_art import ChatART, TrainConfig, Trainer, capture
model = ChatART(model="interrupted", base_url=sys.argv[1], max_tokens=8)
async def rollout(question):
    async with capture(scenario=question) as run:
        run.reward = float("a" in (await model.ainvoke(question)).text)
    return run
trainer = Trainer(model, group_size=4, groups_per_step=1, out_dir="fit")
def told(record):
    print("trained", record.step, flush=True)
trainer.fit_sync(rollout, ['one', 'two'], steps=100, on_step=told, fresh=True)
"""


def test_an_interrupted_fit_ends_with_a_sentence_and_no_traceback(
    art_server: LiveServer, tmp_path: Path
) -> None:
    argv = [sys.executable, "-c", FIT, art_server.base_url]
    with subprocess.Popen(
        argv, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        shown = next((line for line in child.stdout if line == "trained 1\n"), "")
        child.send_signal(signal.SIGINT)
        shown, errors = child.communicate(timeout=120)
    last = " ".join(shown.split())
    assert "of 100. Run the same again" in last, (shown, errors)
    assert last.endswith("go on from there (fit), without fresh=True.")
    assert errors == "" and child.returncode == -signal.SIGINT


def test_in_a_loop_of_the_program_only_the_interrupt_of_the_fit_has_no_traceback(
    art_server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, whose hook is called as the interpreter would at its end."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    trainer = trainer_of(art_server, tmp_path)
    rollout = asking(lambda run, _: run.rng.random(), model_of(art_server, trainer.policy))
    given = [{"id": "one", "question": "one"}]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as ended:
            told = trainer.fit(
                rollout, given, steps=9, on_step=lambda _: signal.raise_signal(signal.SIGINT)
            )
            asyncio.run(told)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Stopped after step 1 of 9. Run the same again" in said(trainer)
    sys.excepthook(ended.type, ended.value, ended.tb)
    assert capsys.readouterr().err == ""
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "KeyboardInterrupt\n"


def test_samples_of_one_scenario_do_not_narrow_the_interval() -> None:
    once = [run("a", 0.0, "x"), run("b", 1.0, "y")]
    often = [run(f"{one.id}{i}", one.reward, str(one.scenario)) for one in once for i in range(9)]
    wide, narrow = (summarize(runs, step=None, versions=[], seconds=0) for runs in (once, often))
    assert wide.ci95 == narrow.ci95
    assert summarize([], step=None, versions=[], seconds=0).mean is None


def test_the_best_is_the_earliest_of_equals() -> None:
    assert best_of_evals([evaluation(None, 0)]) is None
    means = (0.1, 0.7, 0.7, None)
    found = best_of_evals([evaluation(mean, step) for step, mean in enumerate(means)])
    assert found is not None
    assert found.step == 1
