import importlib.util
import linecache
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

from langchain_art import ChatART
from langchain_art.errors import ConfigError
from langchain_art.evaluators import (
    GroupEvaluator,
    RulerEvaluator,
    Score,
    SumEvaluator,
    WeightedCriteriaEvaluator,
    own_rewards,
)
from langchain_art.evaluators.integrations.existing import from_langsmith
from langchain_art.training.addresses import folder_of, sampling_settings
from langchain_art.training.identity import FitIdentity, identity_of, source_of
from langchain_art.wire import LRSchedule, TrainConfig, Trajectory, TrajectoryGroup
from tests.support.fits import settings


def rollout(_: object) -> float:
    return 1.0


def judge(group: TrajectoryGroup) -> Sequence[float]:
    return [1.0 for _ in group.trajectories]


def told(
    scenarios: Sequence[Any] = ("a", "b"),
    evals: Sequence[Any] = (),
    models: dict[str, Any] | None = None,
    function: Any = rollout,
    **changes: Any,
) -> FitIdentity:
    return identity_of(settings(**changes), models or {}, function, scenarios, evals)


@dataclass
class Tools:
    tools: set[int]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            told(configs={"p": TrainConfig(schedule=LRSchedule(warmup_steps=5))}),
            "config.schedule.warmup_steps 0 -> 5",
        ),
        (told(group_size=4), "group_size 8 -> 4"),
        (told(scenarios=["a", "c"]), "the content of scenarios"),
        (told(evals=["a"]), "eval_scenarios (0 -> 1)"),
        (told(policies=("q",), configs={"q": TrainConfig()}), "policy p -> q"),
        (told(evaluator=judge), "the evaluator's source"),
    ],
)
def test_what_differs_is_named(other: FitIdentity, words: str) -> None:
    assert told().differences(other) == [words]


def test_what_changes_no_result_may_differ() -> None:
    assert told().differences(told(concurrency=2, max_failed=1.0)) == []
    assert FitIdentity.model_validate_json(told().model_dump_json()) == told()
    old = told()
    old.settings["forks"] = None  # of an older release
    assert old.differences(told()) == []
    old.settings["forks"] = {"at": ["choose"]}
    assert old.differences(told()) == ["forks.at ['choose'] -> None"]


@pytest.mark.parametrize(
    ("made", "one", "other"),
    [
        (lambda weight: SumEvaluator([(judge, weight), (own_rewards, 0.5)]), 1.0, 0.5),
        (lambda kind: WeightedCriteriaEvaluator(accuracy=kind), "exact", "string"),
        (lambda steps: WeightedCriteriaEvaluator(optimal_steps=steps), None, 3),
        (lambda name: WeightedCriteriaEvaluator(required_actions=[name]), "read", "search"),
        (
            lambda function: from_langsmith(function, "same"),
            lambda outputs: outputs["a"],
            lambda outputs: outputs["b"],
        ),
        (
            lambda answer: RulerEvaluator(RunnableLambda(answer)),
            lambda _: "one",
            lambda _: "other",
        ),
    ],
)
def test_each_setting_of_an_evaluator_counts(made: Any, one: Any, other: Any) -> None:
    before, after = made(one), made(other)
    assert told(evaluator=before).differences(told(evaluator=before)) == []
    [words] = told(evaluator=before).differences(told(evaluator=after))
    parts = ("evaluator's settings", "func", "evaluator.judge")
    assert words in [f"the evaluator's source ({part})" for part in parts]


class Counting(GroupEvaluator):
    def __init__(self, judge: Any) -> None:
        super().__init__("counting")
        self.judge, self.calls, self._seen = judge, 0, dict[str, float]()

    async def ascore(self, group: TrajectoryGroup) -> list[Score | None]:
        self.calls += 1
        self._seen[group.id] = 1.0
        return [Score(1.0) for _ in group.trajectories]


@pytest.mark.parametrize(
    "made", [lambda: ChatART(model="p", base_url="http://h/v1"), lambda: lambda _: "yes"]
)
def test_what_an_evaluator_gathers_and_where_it_is_in_memory_counts_not(
    made: Callable[[], Any],
) -> None:
    used, other = Counting(made()), Counting(made())
    before = told(evaluator=used)
    used.score(TrajectoryGroup(id="g", trajectories=(Trajectory(id="a"),)))
    assert used.calls == 1
    assert before.differences(told(evaluator=used)) == []
    assert before.differences(told(evaluator=other)) == []


def test_settings_of_the_chat_model_count_where_it_is_given() -> None:
    def model(**settings: Any) -> dict[str, Any]:
        return sampling_settings(ChatART(model="p", base_url="http://h/v1", **settings))

    before, after = told(models=model(max_tokens=48)), told(models=model(max_tokens=16))
    assert before.differences(after) == ["p.max_tokens 48 -> 16"]
    assert before.differences(told()) == [], "a policy's name says nothing of settings"


def test_a_set_is_the_same_in_every_process() -> None:
    one, same = {0, 8}, set([8, 0])  # noqa: C405 - which come in another order
    assert told(scenarios=[{"id": 1, "q": one}]) == told(scenarios=[{"id": 1, "q": same}])
    assert told([Tools(one)]) == told([Tools(same)]) != told([Tools({0, 9})])


def test_scenarios_that_are_no_json_count_by_their_id() -> None:
    class Odd:
        def __init__(self, id: str) -> None:
            self.id, self.random = id, random.Random()

    assert told([Odd("a")]) == told([Odd("a")]) != told([Odd("b")])


def test_what_cannot_be_compared_is_known() -> None:
    assert told().unread == []
    assert told(function=len).unread == ["rollout"]
    for text in ("def made(s): return 1.0", "made = lambda s: 1.0"):
        names: dict[str, Any] = {}
        exec(text, names)
        assert source_of(names["made"], "rollout") == {"rollout": ""}


def test_the_folder_follows_from_the_name() -> None:
    assert folder_of("lr-3", None) == Path("out/lr-3")
    assert folder_of(None, None) == Path("out/train")
    assert folder_of(None, "/data/x") == Path("/data/x")
    with pytest.raises(ConfigError, match="leave one of them out"):
        folder_of("lr-3", "out/x")
    for wrong in ("a/b", "", "..", "-x"):
        with pytest.raises(ConfigError, match="got name="):
            folder_of(wrong, None)


def test_a_policy_with_a_config_of_its_own_is_told_apart_and_so_is_a_frozen_one() -> None:
    def of(**configs: TrainConfig) -> FitIdentity:
        return told(policies=("p", "q"), configs=configs)

    both = of(p=TrainConfig(), q=TrainConfig())
    assert both.config == told().config, "one config for all is not written twice"
    other = of(p=TrainConfig(), q=TrainConfig(learning_rate=1e-4))
    assert both.differences(other) == ["config.q.learning_rate None -> 0.0001"]
    assert both.differences(of(p=TrainConfig())) == ["q learns -> does not learn"]
    assert of(q=TrainConfig()).differences(both) == ["p does not learn -> learns"]


def test_a_policy_may_be_named_as_a_setting() -> None:
    both = told(policies=("loss",), configs={"loss": TrainConfig()})
    assert both.with_rates({"loss": 1e-4}).config["learning_rate"] == 1e-4
    other = told(policies=("loss",), configs={"loss": TrainConfig(learning_rate=1e-4)})
    assert both.differences(other) == ["config.learning_rate None -> 0.0001"]


PROGRAM = """
import json, math
from functools import cache, partial, wraps
from typing import TypedDict
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from tests.support.graphs import Scripted

MODEL = Scripted(lines=["x"])
PROMPT = "Answer briefly."
WEIGHT = 0.5
URL = "http://127.0.0.1:4711/v1"
calls = 0

class Mails:
    def find(self): return helper(1)

def helper(x): return x + 1

def score(text): return WEIGHT * len(text)

def rollout(scenario):
    global calls
    calls += 1
    # a comment
    return score(PROMPT + json.dumps(scenario)) + Mails().find()

class State(TypedDict): pass
def node(state): return {"x": score("y")}
graph = StateGraph(State).add_node("n", node).add_edge(START, "n").compile()
in_graph = lambda s: graph.invoke(s)
weighted = lambda bonus: (lambda s: bonus + score(s))
def logged(f):
    @wraps(f)
    def inner(s): return f(s)
    return inner
decorated = logged(rollout)
class Agent:
    def roll(self, s): return score(s)
def at_home(s): return URL + str(calls)
TOOLS = [helper]
def with_tools(s): return TOOLS
@tool
def look(q: str) -> str:
    "Look it up."
    return str(helper(1))
class Cap(AgentMiddleware):
    def before_model(self, state, runtime): return None if helper(2) else {}
agent = create_agent(MODEL, [look], system_prompt="Be brief.", middleware=[Cap()])
def with_agent(s): return agent.invoke(s)
def steps(s): return 1.0 if s else (lambda: score("z"))()
def counted(bonus):
    seen = 0
    def inner(s):
        nonlocal seen
        seen += 1
        return bonus
    return inner
class Unready:
    def __getattr__(self, name): raise RuntimeError("not yet")
session = Unready()
@cache
def known(x): return helper(x)
def at_the_margin():
    @logged
    async def inner(s):
# not yet
        prompt = '''Answer
at once.'''
        return known(len(prompt)) if session else 0
    return inner
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., Any]:
    count = 0

    def load(*changes: tuple[str, str]) -> Any:
        nonlocal count
        text, count = PROGRAM, count + 1
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / f"program_{count}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("program", path)
        assert spec is not None and spec.loader is not None
        sys.modules["program"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def differing(program: Callable[..., Any], name: str, *changes: tuple[str, str]) -> set[str]:
    def read(module: Any) -> dict[str, str]:
        return source_of(eval(name, vars(module)), "rollout")

    before, after = read(program()), read(program(*changes))
    assert before and all(before.values())
    return {key for key in before | after if before.get(key) != after.get(key)}


@pytest.mark.parametrize(
    ("name", "change", "seen"),
    [
        ("rollout", ("score(PROMPT", "2 * score(PROMPT"), {"rollout"}),
        ("rollout", ("briefly", "at length"), {"PROMPT"}),
        ("rollout", ("WEIGHT = 0.5", "WEIGHT = 0.7"), {"WEIGHT"}),
        ("rollout", ("x + 1", "x + 2"), {"helper"}),
        ("rollout", ("helper(1)", "helper(3)"), {"Mails"}),
        ("rollout", ("# a comment", "# another"), set()),
        ("rollout", ("calls = 0", "calls = 7"), set()),
        ("in_graph", ('{"x": score', '{"y": score'), {"node"}),
        ("weighted(1)", ("bonus + score", "bonus - score"), {"rollout"}),
        ("decorated", ("WEIGHT = 0.5", "WEIGHT = 0.7"), {"WEIGHT"}),
        ("Agent().roll", ("WEIGHT = 0.5", "WEIGHT = 0.7"), {"WEIGHT"}),
        ("at_home", ("4711", "4712"), set()),
        ("with_tools", ("x + 1", "x + 2"), {"helper"}),
        ("with_agent", ("Be brief.", "Be long."), {"system_message"}),
        ("with_agent", ("str(helper(1))", "str(helper(2))"), {"look"}),
        ("with_agent", ("helper(2) else", "helper(3) else"), {"Cap"}),
        ("steps", ("WEIGHT = 0.5", "WEIGHT = 0.7"), {"WEIGHT"}),
        ("graph.ainvoke", ('score("y")', 'score("z")'), {"node n"}),
        ("at_the_margin()", ("at once", "at length"), {"rollout"}),
        ("at_the_margin()", ("# not yet", "# never"), set()),
        ("at_the_margin()", ("x + 1", "x + 2"), {"helper"}),
        ("partial(Agent.roll, Agent())", ("WEIGHT = 0.5", "WEIGHT = 0.7"), {"WEIGHT"}),
    ],
)
def test_what_a_change_changes(
    program: Callable[..., Any], name: str, change: tuple[str, str], seen: set[str]
) -> None:
    assert differing(program, name, change) == seen


def test_numbers_that_are_bound_count(program: Callable[..., Any]) -> None:
    module = program()
    one, other = (source_of(module.weighted(bonus), "rollout") for bonus in (1, 2))
    assert {key for key in one if one[key] != other[key]} == {"bonus"}
    one, other = (source_of(module.counted(bonus), "rollout") for bonus in (1, 2))
    assert one.keys() == {"rollout", "bonus"}, "a counter is no constant"
    one, other = (source_of(partial(module.score, weight=w), "r") for w in (1, 2))
    assert {key for key in one if one[key] != other[key]} == {"r(weight)"}


def test_lambdas_count_by_their_lines() -> None:
    def of(value: Any) -> dict[str, str]:
        return source_of(value, "rollout")

    one = of(lambda _: 1.0)
    other = of(lambda _: 2.0)
    assert one != other and one.keys() == other.keys() == {"rollout"}
    [part, *_] = (
        of(given)
        for given in (lambda _: 3.0, len)  # a line of its own that is a part of a statement
    )
    assert part.keys() == {"rollout"} and part["rollout"]


def test_a_file_that_is_changed_while_the_program_runs_has_some_source(
    program: Callable[..., Any],
) -> None:
    module = program()
    Path(module.__file__).write_text("X = [\n" * 50)
    linecache.checkcache()
    assert source_of(module.at_home, "rollout")
