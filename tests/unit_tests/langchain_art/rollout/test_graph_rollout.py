import dataclasses
import datetime
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

from langchain_art.errors import ConfigError
from langchain_art.rollout.gather import gather
from langchain_art.rollout.graph_rollout import graph_input
from langchain_art.rollout.scenarios import MAX_SCENARIO, portable


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
    assert portable("x" * (MAX_SCENARIO - 3)).keys() == {"scenario"}
    circle: list[Any] = []
    circle.append(circle)
    assert portable(circle) == left
