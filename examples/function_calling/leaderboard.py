"""The Berkeley Function Calling Leaderboard: its questions, its answers and its checker.

All are in the package ``bfcl-eval`` (Apache-2.0, github.com/ShishirPatil/gorilla), which pip
fetches once into the user's cache, without the clients and engines that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall, ToolMessage

from langchain_art.packages import cache_folder, made_once, unpack_package

PACKAGE = "bfcl-eval==2026.3.23"
#: One function to call, in Python; or two to four, of which one is to be called. Live ones were
#: written by users.
CATEGORIES = ("simple_python", "multiple", "live_simple", "live_multiple")
#: Characters of a question and its functions, as JSON: longer ones are left out.
LONGEST = 1200
#: Our name among the models that the checker knows.
_MODEL = "langchain-art"

Function = Mapping[str, Any]
#: Of a function, the arguments of its call and those allowed: says that the call is right.
Check = Callable[[Function, Mapping[str, Any], Mapping[str, Any]], bool]


@dataclass(frozen=True)
class Question:
    """A request, and the one call that it has to become.

    Attributes:
        id: The leaderboard's.
        request: What the user asks for.
        functions: Those at hand, in the leaderboard's notation.
        function: The one to be called.
        allowed: By parameter, the values that are right; "" among them: it may be left out.
    """

    id: str
    request: str
    functions: tuple[Function, ...]
    function: Function
    allowed: Mapping[str, Sequence[Any]]

    @property
    def needed(self) -> list[str]:
        """The arguments without which no call is right."""
        required = self.function["parameters"]["required"]
        return [key for key, some in self.allowed.items() if key in required or "" not in some]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The functions as `bind_tools` takes them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": called(one),
                    "description": one["description"],
                    "parameters": _schema(one["parameters"]),
                },
            }
            for one in self.functions
        ]


@dataclass(frozen=True)
class Grade:
    """The worth of what an agent called.

    Attributes:
        reward: The share of right arguments, of those that the call has or should have. 0 for
            another function than the right one.
        correct: The leaderboard's checker takes the call for right.
    """

    reward: float
    correct: bool


def called(function: Function) -> str:
    """A function's name without dots, which no API takes; the checker knows of that."""
    return function["name"].replace(".", "_")


def questions(part: Literal["train", "held out"]) -> list[Question]:
    """Two thirds of the questions, or the others: by a digest of the request."""
    return [one for one in _all() if held_out(one.request) == (part == "held out")]


def held_out(request: str) -> bool:
    """True for a third of all requests."""
    return hashlib.sha256(request.encode()).digest()[0] % 3 == 0


def grade(question: Question, calls: Sequence[ToolCall], right: Check | None = None) -> Grade:
    """Grade what an agent called.

    Args:
        question: What it was asked.
        calls: Its calls, of which there has to be one.
        right: The checker. None: the leaderboard's.
    """
    if [call["name"] for call in calls] != [called(question.function)]:
        return Grade(0.0, False)
    right, given = right or leaderboard_check, calls[0]["args"]
    good = asked = 0
    for name in {**question.allowed, **given}:
        allowed = question.allowed.get(name, ())
        if name in given or name in question.needed:
            asked += 1
            alone = _parameters(question.function, name)
            one = {name: given[name]} if name in given else {}
            good += bool(one and allowed) and right(alone, one, {name: allowed})
    correct = right(question.function, given, question.allowed)
    return Grade(good / asked if asked else float(correct), correct)


def solved(question: Question) -> list[BaseMessage]:
    """The question with its right call, as messages of an earlier conversation."""
    name = called(question.function)
    args = {key: _first(question.allowed[key]) for key in question.needed}
    call = ToolCall(name=name, args=args, id=question.id, type="tool_call")
    return [
        HumanMessage(question.request),
        AIMessage("", tool_calls=[call]),
        ToolMessage("done", tool_call_id=question.id),
    ]


def _first(allowed: Sequence[Any]) -> Any:
    """The first value of several; that of an object has several for each of its keys."""
    return _plain(next(value for value in allowed if value != ""))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _first(v) for key, v in value.items() if "" not in v}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _parameters(function: Function, *names: str) -> Function:
    """A function that has these parameters alone, none of which it requires."""
    properties = function["parameters"]["properties"]
    kept = {name: properties[name] for name in names if name in properties}
    return {**function, "parameters": {"properties": kept, "required": []}}


@cache
def _package() -> Path:
    """The folder with the leaderboard's package; fetched if it is not there."""
    return made_once(
        cache_folder() / PACKAGE,
        lambda out: unpack_package(PACKAGE, out, "the function calling leaderboard"),
    )


@cache
def _all() -> list[Question]:
    found: list[Question] = []
    data = _package() / "bfcl_eval" / "data"
    for category in CATEGORIES:
        file = f"BFCL_v4_{category}.json"
        answers = {
            one["id"]: one["ground_truth"] for one in _lines(data / "possible_answer" / file)
        }
        for one in _lines(data / file):
            [messages], functions = one["question"], one["function"]
            [(name, allowed)] = answers[one["id"]][0].items()
            [function] = [each for each in functions if each["name"] == name]
            request = messages[-1]["content"]
            short = len(request) + len(json.dumps(functions)) <= LONGEST
            answerable = set(allowed) <= set(function["parameters"]["properties"])
            if len(messages) == 1 and short and answerable:
                found.append(Question(one["id"], request, tuple(functions), function, allowed))
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


@cache
def _code() -> Any:
    """The leaderboard's checker, its language, and its types as JSON schema has them.

    The checker looks a model up, for the spelling of names, in a table whose module imports the
    clients of all of its models; ours stands in a table of its own.
    """
    table = ModuleType("bfcl_eval.constants.model_config")
    table.__dict__["MODEL_CONFIG_MAPPING"] = {_MODEL: SimpleNamespace(underscore_to_dot=True)}
    sys.modules[table.__name__] = table
    sys.path.insert(0, str(_package()))
    try:
        return SimpleNamespace(
            check=import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker,
            python=import_module("bfcl_eval.constants.enums").Language.PYTHON,
            types=import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI,
        )
    finally:
        sys.path.remove(str(_package()))


def leaderboard_check(
    function: Function, arguments: Mapping[str, Any], allowed: Mapping[str, Any]
) -> bool:
    """The leaderboard's own `Check`."""
    code, name = _code(), function["name"]
    made, answer = {called(function): arguments}, {name: allowed}
    return code.check([function], [made], [answer], code.python, "simple", _MODEL)["valid"]


def _schema(given: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's description as JSON schema."""
    found = {key: given[key] for key in ("description", "enum") if key in given}
    found["type"] = _code().types[given["type"]]
    if "properties" in given:
        found["properties"] = {key: _schema(one) for key, one in given["properties"].items()}
        found["required"] = given.get("required", [])
    if "items" in given:
        found["items"] = _schema(given["items"])
    return found
