"""Fits that begin anew, and fits of which a run cannot be stored."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from langchain_art import (
    ArtClient,
    ConfigError,
    Exporter,
    RolloutFailed,
    TrainConfig,
    Trainer,
    capture,
)
from langchain_art.export.exporter import Spool
from langchain_art.tracing.run import Run
from langchain_art.training.fit_state import FIT, FitState, read_state
from langchain_art.wire import Trajectory, TrajectoryGroup
from langchain_art.wire.trajectories import MAX_RUN_BYTES
from tests.support.chat_models import model_of
from tests.support.steps_of_a_fit import new_id
from tests.support.stub_engines import StubServer
from tests.support.trainers import said, trainer_of

SCENARIOS = [{"q": "a"}, {"q": "b"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    """Takes hardly more than the largest run in one request."""
    data, settings = tmp_path_factory.mktemp("runs") / "data", f"max_body_bytes = {17 << 20}\n"
    with StubServer(data, seconds=(0.0, 0.01), settings=settings) as started:
        yield started


class Fit:
    """Fits of one policy in one folder, whose rollout raises as often as it is told."""

    def __init__(self, server: StubServer, out: Path) -> None:
        self.out, self.policy, self.server = out, new_id("fresh"), server
        self.model = model_of(server, self.policy, max_tokens=4)
        self.raises = 0
        self.runs = 0

    async def rollout(self, scenario: dict[str, str]) -> Run:
        self.runs += 1
        async with capture(scenario=scenario) as run:
            reply = await self.model.ainvoke(f"{scenario['q']} {run.id}")
            if self.raises:
                self.raises -= 1
                raise ValueError("no such tool")
            run.reward = (sum(reply.text.encode()) % 97) / 97
        return run

    def fit(self, rollout: Any = None, **options: Any) -> int:
        more = {"config": TrainConfig(learning_rate=1e-4)} | options.pop("trainer", {})
        trainer = trainer_of(self.server, self.out, self.policy, **more)
        known: dict[str, Any] = {"steps": 1, "fresh": True} | options
        return trainer.fit_sync(rollout or self.rollout, SCENARIOS, **known).version

    @property
    def state(self) -> tuple[int, set[str], int]:
        """The version that serves, the fit's files, and the policy's jobs."""
        with ArtClient(self.server.base_url) as client:
            version, jobs = client.policy(self.policy).version, client.jobs(self.policy)
        return version, {str(p.relative_to(self.out)) for p in self.out.rglob("*.json*")}, len(jobs)


@pytest.fixture
def trained(server: StubServer, tmp_path: Path) -> Fit:
    found = Fit(server, tmp_path)
    assert found.fit(steps=2) == 2
    assert found.runs == 16, "nothing is tried where nothing is undone"
    found.runs = 0
    return found


def test_no_run_that_works_undoes_nothing(trained: Fit) -> None:
    before = trained.state
    trained.raises = 10**9
    with pytest.raises(RolloutFailed, match=r"(?s)no such tool.*Nothing was rolled back"):
        trained.fit()
    assert trained.state == before
    assert trained.runs == 3, "as many as may fail of a group, and one more"
    with pytest.raises(RolloutFailed, match="Nothing was rolled back"):
        trained.fit(trainer={"max_failed": 1.0})
    assert (trained.state, trained.runs) == (before, 3 + 4)
    trained.raises = 0
    assert trained.fit(steps=3, fresh=False) == 3, "the earlier fit goes on"


def test_one_run_that_works_is_enough_and_what_was_pinned_stays_until_there_is_a_version(
    trained: Fit,
) -> None:
    def pinned() -> list[str]:
        with ArtClient(trained.server.base_url) as client:
            return [one.name for one in client.checkpoints(trained.policy) if one.pinned]

    former, seen = [f"{trained.policy}@2"], list[list[str]]()
    assert pinned() == former
    trained.raises = 1

    async def rollout(scenario: dict[str, str]) -> Run:
        seen.append(pinned())
        return await trained.rollout(scenario)

    assert trained.fit(rollout) == 3, "from @0; a version's number is used once"
    assert seen[2:] == [former] * 8, "two runs are tried"
    assert pinned() == [f"{trained.policy}@3"]
    with ArtClient(trained.server.base_url) as client:
        parents = {one.version: one.parent for one in client.checkpoints(trained.policy)}
    assert parents[3] == 0


def test_a_fit_that_cannot_begin_undoes_nothing(trained: Fit) -> None:
    class Graph:
        async def ainvoke(self, state: Any, config: Any) -> Any: ...

    before = trained.state
    with pytest.raises(ConfigError, match="expected a JSON value"):
        trained.fit(eval_scenarios=[{"q": object()}], trainer={"workers": "server"})
    evaluated: dict[str, Any] = {"evaluator": lambda group: [0.5] * len(group.trajectories)}
    with pytest.raises(ConfigError, match="no input for a graph"):
        trained.fit(Graph(), eval_scenarios=[17], trainer=evaluated)
    assert trained.state == before


def test_a_warm_start_of_one_policy_says_nothing_of_another(
    server: StubServer, tmp_path: Path
) -> None:
    policies = writer, critic = "fresh-writer", "fresh-critic"
    warm = trainer_of(server, tmp_path, writer)
    talk = [[{"role": "user", "content": q}, {"role": "assistant", "content": "b"}] for q in "xyz"]
    assert warm.warm_start_sync(talk, batch_size=1).version == 3
    models = [model_of(server, policy, max_tokens=4) for policy in policies]

    async def rollout(scenario: dict[str, str]) -> Run:
        async with capture(scenario=scenario) as run:
            for model in models:
                reply = await model.ainvoke(f"{scenario['q']} {run.id}")
            run.reward = (sum(reply.text.encode()) % 97) / 97
        return run

    small = {"group_size": 2, "groups_per_step": 1}
    trainer = trainer_of(server, tmp_path, *policies, **small)
    assert trainer.fit_sync(rollout, SCENARIOS, steps=4).versions == {writer: 7, critic: 4}
    trainer = trainer_of(server, tmp_path, *policies, **small)
    trainer.fit_sync(rollout, SCENARIOS, steps=1, fresh=True)
    state = read_state(tmp_path / FIT, FitState)
    assert state is not None
    assert state.began_with == {writer: 3, critic: 0}
    assert f"{critic} is rolled back from @4 to @0" in said(trainer)
    assert "use fit(…, fresh=True)" not in said(trainer), "that is what was called"
    assert f"{writer} is at @3: this fit goes on" in said(trainer)


# --- one run of a batch that cannot be stored fails and says which field, and the others train ----


LONE = "caf\udce9"  # what `open(errors="surrogateescape")` makes of a file that is not UTF-8


def trainer(server: StubServer, out: Path, **options: Any) -> Trainer:
    config = TrainConfig(learning_rate=1e-4)
    return trainer_of(server, out, server.policy, config=config, lora=None, **options)


def output(value: Any) -> Callable[[Run], None]:
    return lambda run: setattr(run, "output", {"files": ["a.txt", value]})


def raised(words: str) -> Callable[[Run], None]:
    def fail(_: Run) -> None:
        raise ValueError(words)

    return fail


SPOILED: dict[str, tuple[Callable[[Run], None], str]] = {
    "state": (output(LONE), "output.files[1]: a text with the lone surrogate '\\udce9'"),
    "integer": (output({"n": 10**5000}), "output.files[1].n: an integer of 16610 bits"),
    "size": (output("x" * MAX_RUN_BYTES), f"output: {MAX_RUN_BYTES + 22:,} bytes"),
    "error": (raised(LONE), "ValueError: caf\\udce9"),
}


def rollout_of(server: StubServer, spoil: Callable[[Run], None]) -> Callable[[Any], Any]:
    """The first run of the first scenario is spoiled; the rewards of a group differ."""
    model, runs = model_of(server, max_tokens=4), Counter[str]()

    async def rollout(scenario: dict[str, Any]) -> Run:
        runs[scenario["q"]] += 1
        number = runs[scenario["q"]]
        async with capture() as run:
            await model.ainvoke(f"{scenario['q']} {number}")
            run.reward = number / 4
            if scenario["q"] == "a" and number == 1:
                spoil(run)
        return run

    return rollout


@pytest.mark.parametrize("kind", SPOILED)
async def test_a_fit_trains_the_others(server: StubServer, tmp_path: Path, kind: str) -> None:
    spoil, why = SPOILED[kind]
    fitting = trainer(server, tmp_path)
    rollout = rollout_of(server, spoil)
    result = await fitting.fit(rollout, SCENARIOS, steps=1, eval_scenarios=SCENARIOS[1:])
    [step] = result.history
    assert (step.failed, step.runs) == (1, 8), "it keeps the reward that it was given"
    assert step.metrics["runs_trained"] == 8
    assert f"1 rollouts failed; the first: {why}" in said(fitting) or kind == "error"
    with ArtClient(server.base_url) as client:
        [failed] = [run for run in client.trajectories(20) if run.status == "failed"][:1]
    assert failed.error is not None and why in failed.error
    assert (failed.reward, len(failed.turns)) == (0.25, 1)


async def test_a_prompt_that_cannot_be_sent(server: StubServer, tmp_path: Path) -> None:
    """The call is refused before it is sent; its run is told of with the calls that it made."""
    model = model_of(server, max_tokens=4)

    def ask(run: Run) -> None:
        run.reward = None
        model.invoke(LONE)

    fitting = trainer(server, tmp_path)
    [step] = (await fitting.fit(rollout_of(server, ask), SCENARIOS, steps=1)).history
    assert (step.failed, step.runs, step.metrics["runs_trained"]) == (1, 7, 7)
    with ArtClient(server.base_url) as client:
        failed = next(run for run in client.trajectories(20) if run.status == "failed")
    first, second = failed.turns
    assert first.call_id is not None and first.messages
    assert (second.messages, second.excluded_because) == ((), "error")
    assert "turns[1].messages[0].content: a text with the lone surrogate" in (failed.error or "")


async def test_large_runs_are_sent_in_parts(server: StubServer, tmp_path: Path) -> None:
    model = model_of(server, max_tokens=4)

    async def rollout(scenario: dict[str, str]) -> Run:
        async with capture() as run:
            run.reward = len((await model.ainvoke(scenario["q"])).text) / 10
            run.output = {"file": "x" * 5_000_000}
        return run

    fitting = trainer(server, tmp_path, groups_per_step=1)
    [step] = (await fitting.fit(rollout, SCENARIOS, steps=1)).history
    assert (step.failed, step.runs) == (0, 4)


@pytest.mark.parametrize("scenario", [{"id": "a\0b"}, {"q": LONE}])
async def test_a_scenario_that_cannot_be_stored(
    server: StubServer, tmp_path: Path, scenario: dict[str, Any]
) -> None:
    """Its runs train where they do not hold it; a graph's input does."""
    model = model_of(server, max_tokens=4)

    async def rollout(_: Any) -> Run:
        async with capture() as run:
            run.reward = (sum((await model.ainvoke(run.id)).text.encode()) % 97) / 97
        return run

    found = await trainer(server, tmp_path).fit(rollout, [scenario, {"q": "b"}], steps=1)
    assert (found.history[0].failed, found.history[0].runs) == (0, 8)

    class Graph:
        async def ainvoke(self, state: Any, config: Any) -> Any:
            await model.ainvoke("hi")
            return {"messages": [HumanMessage(repr(list(state))), AIMessage("done")]}

    judged = trainer(
        server, tmp_path / "graph", evaluator=lambda group: [0.5] * len(group.trajectories)
    )
    found = await judged.fit(Graph(), [scenario, {"q": "b"}], steps=1)
    assert found.history[0].groups == 2


async def test_an_exported_fit_and_production(
    server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("langchain_art.export.exporter.DEADLINE", 0.1)  # nothing takes it
    out = Exporter("otlp", spool=tmp_path / "spool")
    fitting = trainer(server, tmp_path / "fit", export=out)
    [step] = (await fitting.fit(rollout_of(server, output(LONE)), SCENARIOS, steps=1)).history
    assert step.failed == 1
    with capture(export=out) as run:
        model_of(server, max_tokens=4).invoke("hi")
        run.metadata["langfuse_user_id"] = run.output = LONE
    out.close()
    spool = Spool(tmp_path / "spool")
    kept = [one.trajectory for path in spool.files() for one in spool.read(path)[0].runs]
    assert len(kept) == 9
    [failed] = [one for one in kept if one.id == run.id]
    assert (failed.error or "").startswith("output: a text with the lone surrogate")


def test_what_a_program_sends_itself_is_refused_by_its_field(server: StubServer) -> None:
    run = Trajectory(id="t-lone", metadata={"file": {"text": LONE}})
    group = TrajectoryGroup(id="g", trajectories=(run,))
    where = "metadata.file.text: a text with the lone surrogate"
    with ArtClient(server.base_url) as client:
        with pytest.raises(ConfigError, match=where):
            client.post_trajectory(run)
        with pytest.raises(ConfigError, match=r"trajectories\[0\]\." + where):
            client.post_groups([group])
        with pytest.raises(ConfigError, match=r"conversation 1 .*messages\[0\].content: a text"):
            said = [{"role": "user", "content": LONE}, {"role": "assistant", "content": "yes"}]
            client.sft([said], "tiny")
