"""What counts as the source of a rollout: what it says, what it calls, and nothing of libraries."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from langchain_art.training.identity import source_of

PROGRAM = """
import json, math
from functools import wraps
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
        ("rollout", ("WEIGHT * len", "WEIGHT - len"), {"score"}),
        ("rollout", ("briefly", "at length"), {"PROMPT"}),
        ("rollout", ("WEIGHT = 0.5", "WEIGHT = 0.7"), {"WEIGHT"}),
        ("rollout", ("x + 1", "x + 2"), {"helper"}),
        ("rollout", ("helper(1)", "helper(3)"), {"Mails"}),
        ("rollout", ("# a comment", "# another"), set()),
        ("rollout", ("calls = 0", "calls = 7"), set()),
        ("in_graph", ('{"x": score', '{"y": score'), {"node"}),
        ("in_graph", ("WEIGHT = 0.5", "WEIGHT = 0.7"), {"WEIGHT"}),
        ("graph", ('score("y")', 'score("z")'), {"node n"}),
        ("weighted(1)", ("bonus + score", "bonus - score"), {"rollout"}),
        ("decorated", ("WEIGHT = 0.5", "WEIGHT = 0.7"), {"WEIGHT"}),
        ("Agent().roll", ("WEIGHT = 0.5", "WEIGHT = 0.7"), {"WEIGHT"}),
        ("at_home", ("4711", "4712"), set()),
        ("with_tools", ("x + 1", "x + 2"), {"helper"}),
        ("with_agent", ("Be brief.", "Be long."), {"system_message"}),
        ("with_agent", ("str(helper(1))", "str(helper(2))"), {"look"}),
        ("with_agent", ("helper(2) else", "helper(3) else"), {"Cap"}),
        ("with_agent", ("x + 1", "x + 2"), {"helper"}),
        ("steps", ("WEIGHT = 0.5", "WEIGHT = 0.7"), {"WEIGHT"}),
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


@pytest.mark.parametrize("text", ["def made(s): return 1.0", "made = lambda s: 1.0"])
def test_without_source_text_a_function_is_known_as_such(text: str) -> None:
    names: dict[str, Any] = {}
    exec(text, names)
    assert source_of(names["made"], "rollout") == {"rollout": ""}


def test_what_is_no_own_code_is_known_as_such() -> None:
    assert source_of(len, "rollout") == {"rollout": ""}
