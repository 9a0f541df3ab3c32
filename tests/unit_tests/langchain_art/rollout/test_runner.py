import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import partial
from typing import Any, TypedDict

import httpx
import numpy as np
import openai
import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langgraph.graph import StateGraph
from pydantic import BaseModel, Field, RootModel

from langchain_art.call_seeds import run_seed
from langchain_art.errors import (
    OF_OUR_CALL,
    ConfigError,
    EngineUnavailable,
    InvalidRequest,
    RequestRefused,
    RolloutFailed,
    ServerUnreachable,
)
from langchain_art.rollout.gather import GroupStream, gather, gather_from, gather_sync
from langchain_art.rollout.runner import RolloutWorker, is_server_away
from langchain_art.rollout.scenarios import group_ids, portable
from langchain_art.tracing.run import Run
from langchain_art.tracing.scope import capture
from langchain_art.wire import ID, Trajectory
from langchain_art.wire.identifiers import scenario_id


@dataclass(frozen=True)
class Scenario:
    id: str
    value: float = 0.0


SCENARIOS = [Scenario("a", 0.25), Scenario("b", 0.75)]


async def as_run(scenario: Scenario) -> Run:
    async with capture(scenario=scenario.id) as run:
        await asyncio.sleep(0)
        run.reward = scenario.value
    return run


async def as_trajectory(scenario: Scenario) -> Trajectory:
    return (await as_run(scenario)).trajectory()


async def as_number(scenario: Scenario) -> float:
    await FakeListChatModel(responses=["hi"]).ainvoke("hello")
    return scenario.value


def plain_run(scenario: Scenario) -> Run:
    with capture(scenario=scenario.id) as run:
        run.reward = scenario.value
    return run


def plain_number(scenario: Scenario) -> float:
    FakeListChatModel(responses=["hi"]).invoke("hello")
    return scenario.value


class Callable_:
    async def __call__(self, scenario: Scenario) -> float:
        return scenario.value


@pytest.mark.parametrize(
    "rollout",
    [as_run, as_trajectory, as_number, plain_run, plain_number, Callable_(), partial(as_number)],
)
async def test_every_kind_of_rollout_makes_groups(rollout: Any) -> None:
    worker = RolloutWorker(rollout)
    found = await gather_from(worker, SCENARIOS, group_size=3, prefix="fit:1")
    assert [group.id for group in found.groups] == ["fit:1:a", "fit:1:b"]
    for group, scenario in zip(found.groups, SCENARIOS, strict=True):
        assert {t.reward for t in group.trajectories} == {scenario.value}
        assert {t.scenario for t in group.trajectories} == {scenario.id}
    assert len({t.id for t in found.trajectories}) == 6
    if rollout in (as_number, plain_number):  # captured around; runs do not hear each other
        assert {len(t.turns) for t in found.trajectories} == {1}
    assert (found.failed, found.retried, found.first_error) == (0, 0, None)


async def test_no_more_runs_at_once_than_allowed() -> None:
    now, most = set[object](), 0

    def rollout(_: Scenario) -> float:
        nonlocal most
        now.add(me := object())
        most = max(most, len(now))
        time.sleep(0.02)
        now.remove(me)
        return 0.0

    await gather(rollout, SCENARIOS, group_size=8, concurrency=5)
    assert most == 5


def meeting(parties: int) -> Any:
    """A rollout by a graph of one synchronous node, which ends once so many run at once."""
    barrier = threading.Barrier(parties, timeout=60)

    class State(TypedDict):
        value: float

    def node(_: State) -> dict[str, float]:
        barrier.wait()
        return {}

    graph = StateGraph(State).add_node("node", node).set_entry_point("node").compile()

    async def rollout(scenario: Scenario) -> float:
        await graph.ainvoke({"value": scenario.value})
        return scenario.value

    return rollout


#: More than the threads that asyncio has for them: one for each core, four more, at most 32.
AT_ONCE = 40


def test_synchronous_nodes_of_all_runs_run_at_once() -> None:
    async def main() -> None:
        await asyncio.to_thread(int)  # the loop has its executor by now
        await gather(meeting(AT_ONCE), SCENARIOS, group_size=AT_ONCE // 2, max_failed=0)

    for _ in range(2):  # each in a loop of its own
        asyncio.run(main())


async def test_an_executor_of_the_programs_own_stays() -> None:
    mine = ThreadPoolExecutor(2, thread_name_prefix="mine")
    asyncio.get_running_loop().set_default_executor(mine)
    await gather(meeting(2), SCENARIOS, group_size=1, max_failed=0)
    assert (await asyncio.to_thread(threading.current_thread)).name.startswith("mine")


async def test_a_failure_is_kept_and_never_zero() -> None:
    async def rollout(scenario: Scenario) -> float:
        if scenario.id == "a":
            await FakeListChatModel(responses=["hi"]).ainvoke("hello")
            raise ValueError("tool broke")
        return 1.0

    done: list[Trajectory] = []
    found = await gather(rollout, SCENARIOS, group_size=2, on_done=done.append)
    failed = found.groups[0].trajectories
    assert {(t.status, t.reward, t.error, len(t.turns)) for t in failed} == {
        ("failed", None, "ValueError: tool broke", 1)
    }
    assert found.rewards == [1.0, 1.0]
    assert found.failed == 2
    assert found.first_error == "ValueError: tool broke (scenario 'a')"
    assert len(done) == 4


LONE = "caf\udce9"


#: Which scopes a rollout opens and rewards before it raises; which one's run is stored.
NESTED: dict[str, tuple[str, float | None]] = {
    "the inner is closed": ("outer", -1.0),
    "the inner is open": ("outer", -1.0),
    "the inner alone is rewarded": ("inner", 0.5),
    "both are rewarded": ("outer", -1.0),
    "a call of the outer is rewarded": ("outer", None),
    "one after the other": ("second", None),
    "there is no inner one": ("alone", -1.0),
    "all are closed": ("alone", -1.0),
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", NESTED)
async def test_a_failed_run_keeps_its_id_and_the_reward_that_it_was_given(
    kind: str, plain: bool
) -> None:
    ids: dict[str, str] = {}

    def opened(name: str) -> capture:
        scope = capture(scenario=name)
        ids[name] = scope._run.id
        return scope

    def body(_: Scenario) -> Run:
        if kind == "one after the other":
            with opened("first") as run:
                run.reward = -1.0
            with opened("second"):
                raise ValueError("tool broke")
        if NESTED[kind][0] == "alone":
            with opened("alone") as run:
                FakeListChatModel(responses=["hi"]).invoke("hello")
                run.reward = -1.0
                if kind == "there is no inner one":
                    raise ValueError("tool broke")
            raise ValueError("tool broke")
        with opened("outer") as run:
            FakeListChatModel(responses=["hi"]).invoke("hello")
            if kind == "a call of the outer is rewarded":
                run.recorder.turns()
                run._turn_rewards["x"] = 1.0
            elif kind != "the inner alone is rewarded":
                run.reward = -1.0
            with opened("inner") as inner:
                FakeListChatModel(responses=["hi"]).invoke("hello")
                if kind in ("the inner alone is rewarded", "both are rewarded"):
                    inner.reward = 0.5
                if kind == "the inner is open":
                    raise ValueError("tool broke")
            raise ValueError("tool broke")

    async def asynchronous(scenario: Scenario) -> Run:
        return body(scenario)

    rollout: Any = body if plain else asynchronous
    [found] = (await gather(rollout, SCENARIOS[:1], group_size=1, max_failed=1.0)).trajectories
    name, reward = NESTED[kind]
    assert (found.id, found.scenario, found.reward) == (ids[name], name, reward)
    assert len(found.turns) == {"outer": 2, "inner": 1, "second": 0, "alone": 1}[name]
    assert (found.status, found.error) == ("failed", "ValueError: tool broke")


async def test_a_graph_whose_node_opens_a_scope_and_raises_is_the_graphs_run() -> None:
    class Graph:
        async def ainvoke(self, state: Any, config: Any) -> Any:
            await FakeListChatModel(responses=["hi"]).ainvoke("hello")
            with capture(scenario="inner"):
                await FakeListChatModel(responses=["hi"]).ainvoke("hello")
            raise ValueError("tool broke")

    [found] = (await gather(Graph(), ["q"], group_size=1, max_failed=1.0)).trajectories
    assert (found.scenario, len(found.turns)) == (scenario_id("q"), 2)


def test_the_same_trajectory_twice_is_no_group_and_what_ends_a_program_no_failed_rollout() -> None:
    async def rollout(scenario: Scenario) -> Trajectory:
        return Trajectory(id=scenario.id, reward=1.0)

    async def ends(_: Scenario) -> float:
        raise KeyboardInterrupt

    with pytest.raises(ConfigError, match="same trajectory twice"):
        gather_sync(rollout, SCENARIOS, group_size=2)
    with pytest.raises(KeyboardInterrupt):
        gather_sync(ends, SCENARIOS)


async def test_cancelling_stops_the_runs() -> None:
    begun = cancelled = 0

    async def rollout(_: Scenario) -> float:
        nonlocal begun, cancelled
        begun += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return 0.0

    task = asyncio.create_task(gather(rollout, SCENARIOS, group_size=2, concurrency=3))
    while begun < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert begun == cancelled == 3  # and what waited for its turn does not begin


async def test_runs_are_made_anew_when_the_server_was_away_which_is_said_once_an_outage() -> None:
    attempts, waited, said = 0, 0, list[str]()

    async def rollout(_: Scenario) -> float:
        nonlocal attempts
        attempts += 1
        if attempts <= 4:
            raise ValueError("wrapped by the graph") from ServerUnreachable("gone")
        return 1.0

    async def ready() -> None:
        nonlocal waited
        waited += 1
        await asyncio.sleep(0.1)

    worker = RolloutWorker(rollout, ready=ready, say=said.append)
    found = await gather_from(worker, [SCENARIOS[0]] * 4, group_size=1)
    assert (found.rewards, found.failed, found.retried) == ([1.0] * 4, 0, 4)
    assert (attempts, waited) == (8, 4)
    assert said == [
        "The server did not serve a call, so runs that failed by it are repeated; the first: "
        "ValueError: wrapped by the graph (scenario 'a')"
    ]


async def test_retries_are_bounded_and_a_server_that_stays_away_ends_it() -> None:
    async def rollout(_: Scenario) -> float:
        raise EngineUnavailable("restarting")

    async def ready() -> None: ...

    async def away() -> None:
        raise ServerUnreachable("still gone")

    worker = RolloutWorker(rollout, retries=1, ready=ready, max_failed=1.0)
    found = await gather_from(worker, SCENARIOS[:1], group_size=1)
    assert (found.failed, found.retried) == (1, 1)
    with pytest.raises(ServerUnreachable, match="still gone"):
        await gather_from(RolloutWorker(rollout, ready=away), SCENARIOS, group_size=8)


@pytest.mark.parametrize("kind", ["httpx", "implicit", "foreign model"])
async def test_a_tools_own_failure_is_kept_with_its_reward(kind: str) -> None:
    """As a ValueError is: the run is not made again until it looks better."""
    runs = 0

    async def rollout(scenario: Scenario) -> Run:
        nonlocal runs
        runs += 1
        async with capture(scenario=scenario.id) as run:
            run.reward = scenario.value
            if scenario.id == "b":
                return run
            if kind == "httpx":
                raise httpx.ReadTimeout("the tool's own API")
            if kind == "foreign model":
                raise openai.APIConnectionError(request=httpx.Request("POST", "http://judge/v1"))
            try:
                raise ServerUnreachable("gone")
            except ServerUnreachable:
                raise KeyError("raised while one was handled")  # noqa: B904

    found = await gather(rollout, SCENARIOS, group_size=2)
    assert (runs, found.retried, found.failed) == (4, 0, 2)
    assert found.rewards == [0.25, 0.25, 0.75, 0.75]


OURS = "http://localhost:8000/v1"
REQUEST = httpx.Request("POST", f"{OURS}/chat/completions")
FOREIGN = httpx.Request("POST", "http://localhost:9000/v1/chat/completions")


def openai_error(status: int, request: httpx.Request = REQUEST) -> openai.APIStatusError:
    kinds = {429: openai.RateLimitError, 404: openai.NotFoundError}
    kind = kinds.get(status, openai.InternalServerError)
    return kind("x", response=httpx.Response(status, request=request), body=None)


def in_a_stream(refusal: RequestRefused, request: httpx.Request = REQUEST) -> openai.APIError:
    return openai.APIError(str(refusal), request, body=refusal.body()["error"])


def marked(error: Exception) -> Exception:
    setattr(error, OF_OUR_CALL, True)
    return error


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (openai.APIConnectionError(request=REQUEST), True),
        (openai.APITimeoutError(request=REQUEST), True),
        (openai.APIConnectionError(request=httpx.Request("POST", "http://127.0.0.1:8000/x")), True),
        (openai_error(500), True),
        (openai_error(429), True),
        (openai_error(404), False),
        (in_a_stream(EngineUnavailable("x")), True),
        (in_a_stream(InvalidRequest("x")), False),
        (in_a_stream(EngineUnavailable("x"), FOREIGN), False),
        (httpx.ReadTimeout("x", request=REQUEST), True),
        (openai.APIConnectionError(request=FOREIGN), False),
        (openai_error(503, FOREIGN), False),
        (httpx.ReadTimeout("x", request=FOREIGN), False),
        (httpx.ConnectError("x"), False),
        (marked(openai.APIConnectionError(request=FOREIGN)), True),
        (marked(openai_error(503, FOREIGN)), True),
        (marked(openai_error(400, FOREIGN)), False),
        (ServerUnreachable("x"), True),
        (ExceptionGroup("branches", [ValueError(), ServerUnreachable("x")]), True),
        (ExceptionGroup("branches", [ValueError(), httpx.ReadError("x")]), False),
        (ValueError("x"), False),
        (ConnectionError("some tool's socket"), False),
    ],
)
def test_who_is_away(error: Exception, away: bool) -> None:
    assert is_server_away(error, OURS) is away
    wrapped = RuntimeError("node failed")
    wrapped.__cause__ = error
    assert is_server_away(wrapped, OURS) is away
    grouped = ExceptionGroup("branches", [ExceptionGroup("nested", [wrapped])])
    assert is_server_away(grouped, OURS) is away
    handled = RuntimeError("raised while it was handled")
    handled.__context__ = wrapped
    assert not is_server_away(handled, OURS)
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first  # a circle
    assert not is_server_away(first, OURS)


def test_scenario_ids() -> None:
    @dataclass
    class Plain:
        question: str

    assert scenario_id(Scenario("x")) == "x"
    assert scenario_id({"id": 7}) == "7"
    assert scenario_id({"b": 1, "a": 2}) == scenario_id({"a": 2, "b": 1})
    assert scenario_id(Plain("q")) == scenario_id({"question": "q"}) != scenario_id(Plain("r"))
    assert len(scenario_id({"id": "x" * 500})) <= 256
    with pytest.raises(ConfigError, match="attribute"):
        scenario_id(object())
    odd = [{"q": LONE}, {"q": 10**5000}, {"id": LONE}, {"id": "a\0b"}, {"id": LONE * 100}]
    names = [scenario_id(one) for one in odd]
    assert len(set(names)) == len(odd) and names == [scenario_id(one) for one in odd]
    assert all(Trajectory(id="t", scenario=name) for name in names)
    with pytest.raises(ConfigError, match=r"no content to name it by: .*Give it an attribute"):
        scenario_id({"q": LONE, "n": 10**5000})
    left = {"scenario_left_out": "it is not JSON throughout"}
    assert portable({"q": LONE}) == portable({"q": 10**5000}) == left
    assert portable({"q": "é"}) == {"scenario": {"q": "é"}}


class Sets(BaseModel):
    tools: set[int]
    handle: Any = Field(default=None, exclude=True)
    when: Any = date(2026, 1, 2)


@dataclass
class Around:
    one: Any


@pytest.mark.parametrize(
    "around",
    [
        lambda some: Sets(tools=some, handle=object()),
        lambda some: RootModel[Any]({"q": [some]}),
        lambda some: {"q": [Around({"a": some}), 7]},
        lambda some: {(1, 2): Sets(tools=some)},
    ],
)
def test_a_set_anywhere_in_a_scenario_has_no_order(around: Callable[[set[int]], Any]) -> None:
    one, same = {0, 8}, set([8, 0])  # noqa: C405 - which come in another order
    assert scenario_id(around(one)) == scenario_id(around(same)) != scenario_id(around({0, 9}))


@pytest.mark.parametrize("around", [Around, lambda array: {"q": [array]}, RootModel[Any]])
@pytest.mark.parametrize("value", [-1, 1000.000000001, "1000"])
def test_an_array_is_named_by_all_of_it(around: Callable[[Any], Any], value: Any) -> None:
    array = np.arange(2000).astype(object if isinstance(value, str) else type(value))
    other = array.copy()
    other[1000] = value
    assert scenario_id(around(array)) == scenario_id(around(array.copy()))
    assert scenario_id(around(array)) != scenario_id(around(other))


@pytest.mark.parametrize("scenario", [{"q": "When?"}, Scenario("a"), 7, ["a", {"q": 1}], {"id": 3}])
async def test_capture_takes_a_scenario_as_a_trainer_does(scenario: Any) -> None:
    async def rollout(given: Any) -> Run:
        async with capture(scenario=given) as run:
            run.reward = 1.0
        return run

    [found] = (await gather(rollout, [scenario], group_size=1)).trajectories
    assert (found.status, found.scenario) == ("completed", scenario_id(scenario))


def test_group_ids_are_ids_distinct_and_stable() -> None:
    names = ["q-1", "q-1", "where is it?", "where is it!", "x" * 250]
    ids = list(group_ids("fit:3", names))
    assert ids == list(group_ids("fit:3", names))
    assert len(set(ids)) == len(ids)
    assert all(ID.fullmatch(one) for one in ids)
    assert ids[:2] == ["fit:3:q-1", "fit:3:q-1:2"]
    [of_a_base_model] = group_ids("eval:Qwen/Qwen2.5-0.5B-Instruct", ["a"])
    assert ID.fullmatch(of_a_base_model)
    assert of_a_base_model.startswith("eval:Qwen-Qwen2.5-0.5B-Instruct:a-")


def test_errors_show_a_scenario_that_has_no_id_of_its_own() -> None:
    shown = rf"scenario '{scenario_id('Who writes?')}': 'Who writes\?'"
    with pytest.raises(ConfigError, match=rf"returned None for the {shown}.*or with the num"):
        gather_sync(lambda scenario: None, ["Who writes?"], group_size=1)
    with pytest.raises(RolloutFailed, match=rf"\({shown}\)"):
        gather_sync(lambda scenario: 1 / 0, ["Who writes?"], group_size=1)


def test_every_number_is_a_reward() -> None:
    for given in (True, np.bool_(True), Decimal(1), np.float32(1)):
        found = gather_sync(lambda scenario, given=given: given, ["q"], group_size=1)
        with capture() as run:
            run.reward = given
        assert found.rewards == [run.reward] == [1.0]


async def test_too_many_failures_end_it_and_some_do_not() -> None:
    async def rollout(scenario: str) -> float:
        if int(scenario) < 2:
            raise ValueError("no such tool")
        return 1.0

    worker = RolloutWorker(rollout)
    async with GroupStream(worker, str, lambda n, _: f"g-{n}", group_size=2) as groups:
        groups.allow(4)
        runs = [t for g in await groups.take(4) for t in g.trajectories]
        assert Counter(t.status for t in runs) == {"failed": 4, "completed": 4}
        assert worker.first_error is not None
        assert "no such tool" in worker.first_error
    worker = RolloutWorker(rollout, 8, max_failed=0.4)
    async with GroupStream(worker, str, lambda n, _: f"g-{n}", group_size=2) as groups:
        groups.allow(4)
        with pytest.raises(RolloutFailed, match=r"4 rollouts raised, at most 3\.2") as caught:
            await groups.take(4)
    assert isinstance(caught.value.__cause__, ValueError)


async def test_runs_within_a_seeded_run_draw_apart_and_the_same_again() -> None:
    async def draws(kind: Callable[[int], Any]) -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = []

        async def inner(_: str) -> float:
            seed, asked = run_seed.get(), dict[str, Any](messages=["Who?"])
            assert seed is not None
            with seed.seeding(asked, ()):
                found.append((asked["seed"], seed.rng.random()))
            return 1.0

        async def outer(_: str) -> float:
            for _ in range(2):
                await gather(inner, ["a", "b"], group_size=kind(2))
            return 1.0

        await gather(outer, ["s"], group_size=kind(2), seed=kind(1))
        return found

    first = await draws(int)
    assert len(set(first)) == len(first) == 16
    assert sorted(await draws(np.int64)) == sorted(first)
