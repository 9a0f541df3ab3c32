"""Identity of a fit: its config, scenarios, models, settings, and the source of its functions.

A result that was stored is only good for the program that made it. So the reward that a rollout
calls, a prompt in a constant and the nodes of a graph count like the rollout itself. Libraries do
not: whatever is installed is taken as it is.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
import sysconfig
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from numbers import Number
from pathlib import Path
from tokenize import TokenError
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

from langchain_core.runnables import Runnable
from pydantic import Field
from pydantic_core import PydanticSerializationError, to_jsonable_python

from langchain_art.evaluators.base import GroupEvaluator
from langchain_art.evaluators.ruler.judge_model import Judge
from langchain_art.evaluators.scoring import Evaluator
from langchain_art.rollout.runner import Rollout
from langchain_art.training.fit_settings import FitSettings
from langchain_art.training.records import Rates
from langchain_art.wire.identifiers import Frozen, comparable, scenario_id

#: What `Trainer(advantages=)` is called in messages.
_HOOK = "advantage function"


class FitIdentity(Frozen):
    """A fit that has another one is another fit."""

    policies: tuple[str, ...]
    seed: int
    config: dict[str, Any]
    """Config of all policies; or policy -> its own, where they differ; None: does not learn."""
    settings: dict[str, Any]
    models: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """policy -> the sampling settings of its chat model, where the trainer was given one."""
    rollout: dict[str, str]
    """name -> digest, of the rollout and what it names (`source_of`)."""
    evaluator: dict[str, str] = Field(default_factory=dict)
    advantages: dict[str, str] = Field(default_factory=dict)
    """The same of `Trainer(advantages=)`."""
    scenarios: str
    """``128 ab12…``: their number and a digest."""
    eval_scenarios: str

    @property
    def unread(self) -> list[str]:
        """Names that have no source that could be compared."""
        whose = {"rollout": self.rollout, "evaluator": self.evaluator, _HOOK: self.advantages}
        return [name for name, parts in whose.items() if not any(parts.values()) and parts]

    def _configs_differ(self, other: FitIdentity) -> list[str]:
        if self._is_shared and other._is_shared:
            return _changed(flat(self.config, "config"), flat(other.config, "config"))
        found: list[str] = []
        for policy in [name for name in self.policies if name in other.policies]:
            before, after = (
                one.config if one._is_shared else one.config[policy] for one in (self, other)
            )
            if before and after:
                where = f"config.{policy}"
                found += _changed(flat(before, where), flat(after, where))
            elif before or after:
                words = ("learns", "does not learn")
                found.append("{} {} -> {}".format(policy, *(words if before else words[::-1])))
        return found

    @property
    def _is_shared(self) -> bool:
        return self.config.keys() != set(self.policies)

    def with_rates(self, rates: Rates) -> FitIdentity:
        """The identity with the learning rates that are used in its config; none: as it is."""
        if not rates:
            return self
        if self._is_shared:
            config = {**self.config, "learning_rate": rates[self.policies[0]]}
        else:
            config = {
                name: own and {**own, "learning_rate": rates[name]}
                for name, own in self.config.items()
            }
        return self.model_copy(update={"config": config})

    def differences(self, other: FitIdentity) -> list[str]:
        """Differences from `other`, in words: ``config.learning_rate None -> 0.0001``."""
        found: list[str] = []
        if self.policies != other.policies:
            names = (" and ".join(one.policies) for one in (self, other))
            found.append("policy {} -> {}".format(*names))
        found += _changed({"seed": self.seed}, {"seed": other.seed})
        found += self._configs_differ(other)
        found += _changed(flat(self.settings, ""), flat(other.settings, ""))
        for policy in self.models.keys() & other.models.keys():
            before, after = (flat(one.models[policy], policy) for one in (self, other))
            found += _changed(before, after)
        found += _sources(self.rollout, other.rollout, "rollout")
        found += _sources(self.evaluator, other.evaluator, "evaluator")
        found += _sources(self.advantages, other.advantages, _HOOK)
        for name in ("scenarios", "eval_scenarios"):
            before, after = (str(getattr(one, name)).split() for one in (self, other))
            if before[0] != after[0]:
                found.append(f"{name} ({before[0]} -> {after[0]})")
            elif before != after:
                found.append(f"the content of {name}")
        return found


def identity_of(
    plan: FitSettings,
    models: Mapping[str, dict[str, Any]],
    rollout: Rollout | str,
    scenarios: Sequence[Any],
    eval_scenarios: Sequence[Any],
) -> FitIdentity:
    """The identity of a fit that is about to begin."""
    own = {name: config.model_dump(mode="json") for name, config in plan.configs.items()}
    config = {name: own.get(name) for name in plan.policies}
    if all(one == config[plan.policies[0]] for one in config.values()):
        config = own[plan.policies[0]]
    settings = plan.shaping
    settings["lora"] = None if plan.lora is None else plan.lora.model_dump(mode="json")
    return FitIdentity(
        policies=plan.policies,
        seed=plan.seed,
        config=config,
        settings=settings,
        models=dict(models),
        rollout={"rollout": rollout} if isinstance(rollout, str) else source_of(rollout, "rollout"),
        evaluator={} if plan.evaluator is None else _judge(plan.evaluator, "evaluator"),
        advantages={} if plan.advantages is None else source_of(plan.advantages, _HOOK),
        scenarios=_digest_of(scenarios),
        eval_scenarios=_digest_of(eval_scenarios),
    )


def _judge(evaluator: Evaluator, name: str) -> dict[str, str]:
    """An evaluator's source; of one of ours, its settings and those of its parts."""
    if not isinstance(evaluator, GroupEvaluator):
        return source_of(evaluator, name)
    found = {k: v for k, v in source_of(evaluator, name).items() if v}
    plain = {"": type(evaluator).__name__}
    counters = re.findall(r"self\.(\w+) [-+]=", _text(type(evaluator)))
    for key, value in vars(evaluator).items():
        members: Mapping[str, Any] = value if isinstance(value, Mapping) else {key: value}
        if isinstance(value, Judge):
            plain[key], members = str(value), {key: value.model}
        elif not key.startswith("_") and key not in counters:
            numbers = {k: v for k, v in members.items() if _is_plain(v)}
            plain |= {k if k == key else f"{key}.{k}": repr(v) for k, v in numbers.items()}
        for part, one in members.items():
            if isinstance(one, GroupEvaluator):
                found |= _judge(one, f"{name}.{part}")
            elif callable(one) or isinstance(one, Runnable):
                found |= {k: v for k, v in source_of(one, f"{name}.{part}").items() if v}
                # Also of a library, whose source is not read.
                plain[f"{key}: {part}"] = getattr(one, "__qualname__", type(one).__qualname__)
    text = json.dumps(plain, sort_keys=True)
    return {f"{name}'s settings": hashlib.sha256(text.encode()).hexdigest()[:16], **found}


def _is_plain(value: Any) -> bool:
    """True for a number, a text, or a tuple of them, which read the same in every process."""
    members = value if isinstance(value, tuple) else (value,)
    return all(isinstance(one, str | int | float) for one in members)


def _digest_of(scenarios: Sequence[Any]) -> str:
    found = hashlib.sha256()
    for scenario in scenarios:
        try:
            text = json.dumps(to_jsonable_python(comparable(scenario)), sort_keys=True)
        except (PydanticSerializationError, TypeError, ValueError, RecursionError):
            text = scenario_id(scenario)
        found.update(text.encode() + b"\0")
    return f"{len(scenarios)} {found.hexdigest()[:16]}"


def flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Nested settings by their path: ``config.schedule.warmup_steps``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            found |= flat(value, path)
        else:
            found[path] = value
    return found


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {before.get(name)} -> {after.get(name)}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _sources(before: Mapping[str, str], after: Mapping[str, str], whose: str) -> list[str]:
    changed = [
        name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)
    ]
    if not changed:
        return []
    inner = [name for name in changed if name != whose]
    return [f"the {whose}'s source" + (f" ({', '.join(inner)})" if inner else "")]


_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("stdlib", "purelib", "platlib")}
)
#: This package, where it is a checkout.
_OURS = str(Path(__file__).resolve().parents[1])
#: Attributes in which objects of LangChain, LangGraph, LangSmith and Python keep the functions that
#: they are made of.
_INNER = (
    *("func", "afunc", "coroutine", "bound", "first", "middle", "last", "_tools_by_name"),
    "__wrapped__",  # of `functools.cache`
)
#: Containers with more are data.
_MOST = 200


def source_of(value: object, name: str) -> dict[str, str]:
    """Digests by name of `value`, called `name`, and of all own code and constants it names.

    A lambda counts by all lambdas of its lines. What has no source text (typed into a prompt, made
    by ``exec``) has an empty digest: a change of it cannot be seen.
    """
    parts: dict[str, str] = {}
    _Reader(parts).read(value, name)
    return parts or {name: ""}


class _Reader:
    def __init__(self, parts: dict[str, str]) -> None:
        self._parts = parts
        self._seen: dict[int, Any] = {}  # kept alive, so that no other object gets its number

    def read(self, value: Any, name: str) -> None:
        if id(value) in self._seen or isinstance(value, str | bytes | int | float | None):
            return
        self._seen[id(value)] = value
        if isinstance(value, partial):
            for key, one in (dict(enumerate(value.args)) | value.keywords).items():
                self._constant(one, f"{name}({key})")
            self.read(value.func, name)
        elif isinstance(value, MethodType):
            owner = cast("type", type(value.__self__))
            own = is_own_module(sys.modules.get(owner.__module__))
            for one in (owner,) if own else (value.__func__, value.__self__):
                self.read(one, name)
        elif isinstance(value, FunctionType):
            self._function(inspect.unwrap(value), name)
        elif isinstance(value, type):
            self._class(value)
        else:
            self._object(value, name)

    def _function(self, function: FunctionType, name: str) -> None:
        cells = _cells(function)
        if _is_own(function.__code__.co_filename):
            if self._parts and function.__name__ != "<lambda>":
                name = function.__name__
            text = _text(function)
            self._keep(name, text)
            self._names(text, function.__globals__, cells)
            return
        for word, value in cells.items():  # of `create_agent`: tools, middleware and prompt
            if "prompt" in word or "system" in word:
                self._constant(getattr(value, "content", value), word)
            self.read(value, word)

    def _class(self, kind: type) -> None:
        module = sys.modules.get(kind.__module__)
        if is_own_module(module):
            text = _text(kind)
            self._keep(kind.__name__, text)
            cells: dict[str, Any] = {}
            for method in vars(kind).values():
                cells |= _cells(method) if isinstance(method, FunctionType) else {}
            self._names(text, vars(module), cells)

    def _names(self, text: str, scope: Mapping[str, Any], cells: Mapping[str, Any]) -> None:
        """Read what a text names: of its closure, of its module and of other own modules."""
        words = dict.fromkeys(re.findall(r"[^\W\d]\w*", text))
        changed = set(re.findall(r"\w+", " ".join(re.findall(r"(?:global|nonlocal) (.*)", text))))
        for word in words:
            value = cells.get(word, scope.get(word))
            if isinstance(value, ModuleType):
                if is_own_module(value):
                    inner = [one for one in words if one in vars(value)]
                    self._names(" ".join(inner), vars(value), {})
            elif word not in changed and (word.isupper() or isinstance(cells.get(word), Number)):
                self._constant(value, word)
            self.read(value, word)

    def _object(self, value: Any, name: str) -> None:
        """Read a container of functions, a graph, a tool, a chain, or an object of an own class."""
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, list | tuple | set | frozenset):
            for one in value if len(value) <= _MOST else ():
                if callable(one) or hasattr(one, "func"):
                    self.read(one, name)
            return
        # Without asking the object, which may be a proxy of something that is not there yet.
        nodes: Any = getattr(inspect.getattr_static(value, "builder", None), "nodes", None)
        if isinstance(nodes, Mapping):
            for node, spec in nodes.items():
                self.read(getattr(spec, "runnable", spec), f"node {node}")
        for attribute in _INNER:
            if inspect.getattr_static(value, attribute, None) is not None:
                self.read(getattr(value, attribute, None), name)
        self._class(type(value))

    def _constant(self, value: Any, name: str) -> None:
        """Keep a number, a text, or a tuple of them; the address of a server is none."""
        if _is_plain(value) and "://" not in repr(value):
            self._keep(name, repr(value))

    def _keep(self, name: str, text: str) -> None:
        digest = text and hashlib.sha256(text.encode()).hexdigest()[:16]
        unique, number = name, 2
        while self._parts.get(unique, digest) != digest:  # of another module, say
            unique, number = f"{name} {number}", number + 1
        self._parts[unique] = digest


def _cells(function: FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            found[word] = cell.cell_contents
    return found


def is_own_module(module: ModuleType | None) -> bool:
    """True if a module is of the program, not of Python, a library or this package."""
    file = getattr(module, "__file__", None)
    if file is None:  # of Python itself, or what was typed into a prompt or a notebook
        return module is not None and module.__name__ == "__main__"
    return _is_own(file)


@cache
def _is_own(file: str) -> bool:
    if file.startswith("<frozen"):
        return False
    path = str(Path(file).resolve())
    return not path.startswith((*(f"{root}/" for root in _LIBRARIES), f"{_OURS}/"))


def _text(value: FunctionType | type) -> str:
    """The source without comments and layout; of a lambda, all of its lines' lambdas.

    Empty without source.
    """
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError, SyntaxError, TokenError):  # there is none, or the file is changed
        return ""
    tree: ast.AST | None = None
    text = textwrap.dedent(source)
    # A comment or a line of a text that stands at the margin keeps what is nested from dedenting.
    for whole in (text, f"if True:\n{source}"):
        with suppress(SyntaxError):
            tree = tree or ast.parse(whole)
    is_lambda = value.__name__ == "<lambda>"
    if tree is None:  # lines of a lambda that are a part of a statement
        return text[max(0, text.find("lambda") if is_lambda else 0) :]
    if not is_lambda:
        return ast.unparse(tree)
    return "\n".join(ast.unparse(one) for one in ast.walk(tree) if isinstance(one, ast.Lambda))
