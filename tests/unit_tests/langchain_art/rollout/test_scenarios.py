import dataclasses
import datetime
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

from langchain_art.errors import ConfigError
from langchain_art.rollout.gather import gather, gather_sync
from langchain_art.rollout.graph_rollout import graph_input
from langchain_art.rollout.scenarios import (
    MAX_SCENARIO,
    check_portable,
    check_scenarios,
    draw,
    load,
    portable,
    rollout_name,
)
from tests.support import leased_agent


def test_batches_are_epochs_without_replacement_of_any_sequence() -> None:
    for scenarios in ([*range(10)], range(10), np.arange(10)):
        check_scenarios(scenarios, "scenarios")
        seen = [draw(scenarios, position, seed=1) for position in range(20)]
        assert sorted(seen[:10]) == sorted(seen[10:20]) == [*scenarios]
        assert seen[:10] != seen[10:20]
        assert [draw(scenarios, p, seed=2) for p in range(20)] != seen
    with pytest.raises(ConfigError, match=r"got str \('Who\?'\), expected a list of scenarios"):
        gather_sync(lambda _: 1.0, "Who?")


def test_a_function_of_a_module_has_the_name_that_finds_it() -> None:
    name = rollout_name(leased_agent.rollout)
    assert name == leased_agent.NAME
    assert load(name) is leased_agent.rollout
    assert rollout_name("my_agent:rollout") == "my_agent:rollout"
    assert rollout_name(Agent.of_all) == f"{__name__}:Agent.of_all"
    for wrong, words in (
        ("nowhere:rollout", "cannot be loaded"),
        (f"{leased_agent.__name__}:nothing", "cannot be loaded"),
        ("my_agent", "expected MODULE:NAME"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(wrong)


@pytest.mark.parametrize("argv", [["train.py"], ["-m", "train"]])
def test_a_function_of_the_program_that_was_started_is_named_by_its_file(
    argv: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "from langchain_art.rollout.scenarios import rollout_name\n"
        "def rollout(scenario): ...\n"
        "print(rollout_name(rollout))\n"
    )
    done = subprocess.run([sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "train:rollout\n", done.stderr


class Agent:
    def rollout(self, scenario: object) -> float:
        return 1.0

    @classmethod
    def of_all(cls, scenario: object) -> float:
        return 1.0


@pytest.mark.parametrize(
    "rollout", [lambda _: 1.0, partial(leased_agent.rollout), object(), Agent().rollout]
)
def test_what_no_other_process_finds_is_refused(rollout: Any) -> None:
    with pytest.raises(ConfigError, match="expected a function of a module: workers import it"):
        rollout_name(rollout)

    class Remote:
        assistant_id = "agent"

        def invoke(self) -> None: ...

    with pytest.raises(ConfigError, match="it runs on another machine already"):
        rollout_name(Remote())


def test_json_values_go_to_workers_and_others_are_refused_with_their_place() -> None:
    known = ["q", 1, 0.5, None, True, [1, "a"], {"a": {"b": [None]}}]
    check_portable(known, "train_scenarios")
    for other in ((1, 2), {1: "a"}, {"a": (1,)}, {"a"}, object(), float("nan"), b"a"):
        with pytest.raises(ConfigError, match=r"train_scenarios\[7\]: got .*, expected a JSON va"):
            check_portable([*known, other], "train_scenarios")


# --- graphs ---------------------------------------------------------------------------------------


class State(MessagesState):
    place: str


def graph(answer: Any = None, **options: Any) -> Any:
    model = FakeListChatModel(responses=["hi"])

    def say(state: State) -> dict[str, Any]:
        said = model.invoke(state["messages"])
        return {"messages": [said if answer is None else answer(state)]}

    built = StateGraph(State)
    built.add_node("say", say)
    built.add_edge(START, "say")
    return built.compile(**options)


@dataclasses.dataclass
class Question:
    id: str
    input: Any
    answer: str = ""


HUMAN = HumanMessage("Hi")


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("Hi", {"messages": [("user", "Hi")]}),
        ([("user", "Hi")], {"messages": [("user", "Hi")]}),
        ([{"role": "user", "content": "Hi"}], {"messages": [{"role": "user", "content": "Hi"}]}),
        ({"messages": ["Hi"], "input": "x"}, {"messages": ["Hi"], "input": "x"}),
        ({"question": "Hi"}, {"question": "Hi"}),
        ({"id": 1, "input": "Hi"}, {"messages": [("user", "Hi")]}),
        (Question("q", [HUMAN]), {"messages": [HUMAN]}),
        (Question("q", {"place": "x"}), {"place": "x"}),
    ],
)
def test_what_a_scenario_is_to_a_graph(scenario: Any, expected: Any) -> None:
    assert graph_input(scenario) == expected


@pytest.mark.parametrize(
    "scenario",
    [7, [], ["Hi"], ("user", "Hi"), {"input": None}, Question("q", None)],
)
async def test_what_is_no_input_is_said_before_anything_runs(scenario: Any) -> None:
    ran: list[Any] = []
    built = graph(lambda state: ran.append(state))
    with pytest.raises(ConfigError, match="no input for a graph"):
        await gather(built, ["Hi", scenario], group_size=1)
    assert ran == []
    with pytest.raises(ConfigError, match=r"graph\.compile\(\)"):
        await gather(StateGraph(State), ["Hi"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a function of one scenario"):
        await gather("rollout", ["Hi"])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["ainvoke", "invoke"])
async def test_a_graph_is_a_rollout(kind: str) -> None:
    built = graph()
    if kind == "invoke":

        class Blocking:
            invoke = built.invoke

        built = Blocking()
    found = await gather(built, ["Hi", "Ho"], group_size=2)
    assert (found.failed, found.rewards) == (0, [])
    for group, said in zip(found.groups, ["Hi", "Ho"], strict=True):
        assert group.metadata == {"scenario": said}
        for run in group.trajectories:
            assert [turn.node for turn in run.turns] == ["say"]
            assert [m["content"] for m in run.output["messages"]] == [said, "hi"]
    assert len({run.id for run in found.trajectories}) == 4


@pytest.mark.parametrize("wrap", [lambda g: g, lambda g: RunnableLambda(lambda x: x) | g])
async def test_each_run_has_a_thread_of_its_own(wrap: Any) -> None:
    built = graph(checkpointer=InMemorySaver())
    found = await gather(wrap(built), ["Hi"], group_size=3)
    assert found.failed == 0
    threads = {turn.thread for run in found.trajectories for turn in run.turns}
    assert len(threads) == 3
    assert all(len(run.output["messages"]) == 2 for run in found.trajectories)


# --- what goes along for the evaluator ------------------------------------------------------------


class Model(BaseModel):
    id: str
    day: datetime.date


def test_a_scenario_goes_along_as_json() -> None:
    for scenario, expected in (
        ("Hi", "Hi"),
        (Question("q", ("a", "b"), "x"), {"id": "q", "input": ["a", "b"], "answer": "x"}),
        (Model(id="m", day=datetime.date(2026, 1, 2)), {"id": "m", "day": "2026-01-02"}),
    ):
        assert portable(scenario) == {"scenario": expected}
    assert portable([HUMAN])["scenario"][0]["content"] == "Hi"


def test_what_json_cannot_carry_stays_here_and_that_is_said() -> None:
    left = {"scenario_left_out": "it is not JSON throughout"}
    assert portable(Question("q", object())) == left
    assert portable(float("nan")) == left
    large = {"scenario_left_out": "it is 64,002 bytes of JSON, of at most 64,000"}
    assert portable("x" * MAX_SCENARIO) == large
    circle: list[Any] = []
    circle.append(circle)
    assert portable(circle) == left
