"""Identity of a fit: its config, scenarios, the rollout's source, models, settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import Field
from pydantic_core import PydanticSerializationError, to_jsonable_python

from langchain_art.evaluators.base import GroupEvaluator
from langchain_art.evaluators.scoring import Evaluator
from langchain_art.rollout.runner import Rollout
from langchain_art.rollout.source import source_of
from langchain_art.training.collapse import Gate, not_below
from langchain_art.training.fit_settings import FitSettings
from langchain_art.training.records import Rates, Record
from langchain_art.wire.identifiers import scenario_id

#: Settings of the trainer that change what a fit learns.
_SETTINGS = (
    "group_size",
    "groups_per_step",
    "max_steps_ahead",
    "dynamic_sampling_rounds",
    "difficulty_pools",
    "on_collapse",
    "lora",
)
#: What `Trainer(advantages=)` is called in messages.
_HOOK = "advantage function"


class FitIdentity(Record):
    """A fit that has another one is another fit."""

    policies: tuple[str, ...]
    seed: int
    config: dict[str, Any]
    """Config of all policies; or policy -> its own, where they differ; None: does not learn."""
    settings: dict[str, Any]
    models: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """policy -> the sampling settings of its chat model, where the trainer was given one."""
    rollout: dict[str, str]
    """name -> digest, of the rollout and what it names (`rollout.source`)."""
    evaluator: dict[str, str] = Field(default_factory=dict)
    gate: dict[str, str] = Field(default_factory=dict)
    advantages: dict[str, str] = Field(default_factory=dict)
    """The same of `Trainer(advantages=)`."""
    scenarios: str
    """``128 ab12…``: their number and a digest."""
    eval_scenarios: str

    @property
    def unread(self) -> list[str]:
        """Names that have no source that could be compared."""
        whose = {
            "rollout": self.rollout,
            "evaluator": self.evaluator,
            "gate": self.gate,
            _HOOK: self.advantages,
        }
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
        return not all(name in self.config for name in self.policies)

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
        found += _sources(self.gate, other.gate, "gate")
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
    settings = {name: getattr(plan, name) for name in _SETTINGS}
    settings["lora"] = None if plan.lora is None else plan.lora.model_dump(mode="json")
    return FitIdentity(
        policies=plan.policies,
        seed=plan.seed,
        config=config,
        settings=settings,
        models=dict(models),
        rollout={"rollout": rollout} if isinstance(rollout, str) else source_of(rollout, "rollout"),
        evaluator={} if plan.evaluator is None else _judge(plan.evaluator, "evaluator"),
        gate={} if plan.gate is None else _judged_by(plan.gate),
        advantages={} if plan.advantages is None else source_of(plan.advantages, _HOOK),
        scenarios=_digest_of(scenarios),
        eval_scenarios=_digest_of(eval_scenarios),
    )


def _judged_by(gate: Gate) -> dict[str, str]:
    return {"gate": gate.__name__} if gate is not_below else source_of(gate, "gate")


def with_rates(config: Mapping[str, Any], rates: Rates) -> dict[str, Any]:
    """`FitIdentity.config` with the learning rates that are used."""
    if not isinstance(rates, dict):
        return {**config, "learning_rate": rates}
    return {name: own and {**own, "learning_rate": rates[name]} for name, own in config.items()}


def _judge(evaluator: Evaluator, name: str) -> dict[str, str]:
    """An evaluator's source; of one of ours, its settings and those of its parts."""
    if not isinstance(evaluator, GroupEvaluator):
        return source_of(evaluator, name)
    found = {k: v for k, v in source_of(evaluator, name).items() if v}
    plain = {"": type(evaluator).__name__}
    for key, value in vars(evaluator).items():
        if isinstance(value, Mapping):
            members = cast("Mapping[str, Any]", value)
            numbers = {k: v for k, v in members.items() if isinstance(v, int | float | str)}
            plain |= {f"{key}.{k}": repr(v) for k, v in numbers.items()}
        else:
            members = {key: value}
            if key == "judge":
                plain[key] = str(value)
            elif isinstance(value, str | int | float) and not key.startswith("_"):
                plain[key] = repr(value)
        for part, one in members.items():
            if isinstance(one, GroupEvaluator):
                found |= _judge(one, f"{name}.{part}")
            elif callable(one) and key != "judge":
                found |= {k: v for k, v in source_of(one, f"{name}.{part}").items() if v}
    text = json.dumps(plain, sort_keys=True)
    return {f"{name}'s settings": hashlib.sha256(text.encode()).hexdigest()[:16], **found}


def _digest_of(scenarios: Sequence[Any]) -> str:
    found = hashlib.sha256()
    for scenario in scenarios:
        try:
            text = json.dumps(to_jsonable_python(scenario), sort_keys=True)
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
            found |= flat(cast("Mapping[str, Any]", value), path)
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
