"""The settings of a fit, and the checks of `Trainer(config=)` and `Trainer(trainable=)`.

They find a misspelled name before the fit or in its first batch, instead of after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import StrictBool, StrictStr, TypeAdapter, ValidationError

from langchain_art.errors import ConfigError
from langchain_art.evaluators.scoring import Evaluator
from langchain_art.export.exporter import Exporter
from langchain_art.ray import RayWorkers
from langchain_art.rollout.graph_rollout import is_graph
from langchain_art.rollout.runner import Rollout
from langchain_art.rollout.scenarios import (
    check_count,
    check_portable,
    check_scenarios,
    rollout_name,
)
from langchain_art.rollout.worker import MAX_CONCURRENCY
from langchain_art.training.advantages import AdvantageHook
from langchain_art.wire import LoraConfig, SFTConfig, TrainConfig, Trajectory

T = TypeVar("T")
Workers: TypeAlias = Literal["server", "ray"] | RayWorkers
_WORKERS = ("server", "ray")
OnCollapse: TypeAlias = Literal["rollback", "stop", "warn"]
Configs: TypeAlias = TrainConfig | Mapping[str, TrainConfig | None] | None
_SHOWN = 40
#: Marks an option by which a fit is another fit (`FitSettings.shaping`).
_LEARNS = {"learns": True}
#: Marks an option that may be None where it has a least number.
_OR_NONE = {"or_none": True}
_BY_NAME = TypeAdapter(dict[StrictStr, StrictBool])


@dataclass(frozen=True)
class FitSettings:
    """The options of `Trainer`, where each is documented."""

    policies: tuple[str, ...]
    trainable: dict[str, bool]
    evaluator: Evaluator | None
    group_size: int = field(metadata={"least": 2} | _LEARNS)
    groups_per_step: int = field(metadata={"least": 1} | _LEARNS)
    concurrency: int | None = field(metadata={"least": 1} | _OR_NONE)
    """Most rollouts at once, as given; see `at_once`."""
    configs: dict[str, TrainConfig]
    """policy -> how it learns; one without plays and does not learn."""
    seed: int = field(metadata={"least": None})
    lora: LoraConfig | None = field(metadata=_LEARNS)
    max_failed: float
    max_steps_ahead: int = field(metadata={"least": 0} | _LEARNS)
    dynamic_sampling_rounds: int | None = field(metadata={"least": 0} | _OR_NONE | _LEARNS)
    advantages: AdvantageHook | None = None
    on_collapse: OnCollapse = field(default="rollback", metadata=_LEARNS)
    export: Exporter | None = None
    workers: Workers | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value, given = getattr(self, one.name), one.metadata
            if "least" in given and not (value is None and "or_none" in given):
                count = check_count(value, one.name, given["least"])
                object.__setattr__(self, one.name, count)
        if not 0 <= self.max_failed <= 1:
            raise ConfigError(f"got max_failed={self.max_failed}, expected a fraction from 0 to 1")
        if self.on_collapse not in get_args(OnCollapse):
            raise ConfigError(
                f"got on_collapse={self.on_collapse!r}, expected one of {get_args(OnCollapse)}"
            )
        known = self.workers is None or isinstance(self.workers, RayWorkers)
        if not known and self.workers not in _WORKERS:
            raise ConfigError(
                f"got workers={self.workers!r}, expected one of {_WORKERS}, RayWorkers(…), or None "
                "for rollouts in this process"
            )

    @property
    def shaping(self) -> dict[str, Any]:
        """The options that change what a fit learns and are plain values, by name."""
        return {
            one.name: getattr(self, one.name) for one in fields(self) if "learns" in one.metadata
        }

    @property
    def at_once(self) -> int:
        """Most rollouts at once: by default all of a step, and at least 64."""
        if self.concurrency is not None:
            return self.concurrency
        return min(MAX_CONCURRENCY, max(64, self.group_size * self.groups_per_step))

    @property
    def learning(self) -> tuple[str, ...]:
        """The policies that learn."""
        return tuple(self.configs)

    @property
    def reads_rewards(self) -> bool:
        """True if some policy learns from rewards."""
        return any(config.reads_rewards for config in self.configs.values())


def check_trainable(trainable: Mapping[str, bool] | None) -> dict[str, bool]:
    """`trainable` as the server gets it (`wire.Turn.learns`); empty for None. Or ConfigError."""
    try:
        return _BY_NAME.validate_python({} if trainable is None else trainable)
    except ValidationError as error:
        raise ConfigError(
            f"got trainable={trainable!r:.200}, expected names of nodes, tags or models with True "
            'or False, such as {"writer": True, "critic": False}'
        ) from error


def check_configs(config: Configs, policies: Sequence[str]) -> dict[str, TrainConfig]:
    """Policy -> its config, without policies that do not learn.

    Raises:
        ConfigError: a mapping has other names than `policies`, or lets none of them learn; or a
            config is none of a step by rewards.
    """
    if not isinstance(config, Mapping):
        return dict.fromkeys(policies, _check_config(config or TrainConfig()))
    unknown = sorted(str(name) for name in config.keys() - set(policies))
    missing = [name for name in policies if name not in config]
    if unknown or missing:
        raise ConfigError(
            f"got config= with {', '.join(map(repr, unknown)) or 'no other names'} and without "
            f"{', '.join(map(repr, missing)) or 'none of the policies'}, expected an entry for "
            f"each of {list(policies)}: a TrainConfig, or None for one that plays and does not "
            "learn"
        )
    found = {name: config[name] for name in policies}
    learning = {name: _check_config(one) for name, one in found.items() if one is not None}
    if not learning:
        raise ConfigError(
            f"got config={found}, which lets no policy learn, expected a TrainConfig for one at "
            "least; to evaluate without training, use `evaluate`"
        )
    return learning


def _check_config(config: object) -> TrainConfig:
    if isinstance(config, SFTConfig):
        raise ConfigError(
            "got an SFTConfig, which reads no rewards, expected a TrainConfig for `fit`; give "
            "this config to `warm_start`"
        )
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"got config={config!r:.200}, expected a TrainConfig")
    return config


def check_reward(rollout: Rollout | str, evaluator: Evaluator | None) -> None:
    """A ConfigError if runs of `rollout` bring no reward and nothing gives them one."""
    if is_graph(rollout) and evaluator is None:
        raise ConfigError(
            f"got the graph {type(rollout).__name__} as it is, which brings no reward. Pass "
            "evaluator= to the Trainer, or a function that runs the graph and returns a "
            "number instead."
        )


def check_scope(
    plan: FitSettings,
    rollout: Rollout | str,
    scenarios: Sequence[object],
    eval_scenarios: Sequence[object],
    steps: int,
) -> None:
    """A ConfigError if `rollout` or the scenarios cannot be trained on as `plan` says."""
    if (plan.reads_rewards and plan.advantages is None) or len(eval_scenarios):
        check_reward(rollout, plan.evaluator)
    check_workers(plan, rollout, train_scenarios=scenarios, eval_scenarios=eval_scenarios)
    if steps and not len(scenarios):
        raise ConfigError("train_scenarios: got none, expected at least one")


def check_workers(plan: FitSettings, rollout: Rollout | str, **scenarios: Sequence[object]) -> None:
    """A ConfigError if scenarios are no list of them, or workers cannot run `rollout` on them."""
    for name, some in scenarios.items():
        check_scenarios(some, name)
        if plan.workers is not None:
            check_portable(some, name)
    if plan.workers is not None:
        rollout_name(rollout)
    elif isinstance(rollout, str):
        raise ConfigError(
            f"got the rollout {rollout!r}, a name, which workers run; expected the function, or "
            'Trainer(workers="server")'
        )


def check_kind(name: str, value: object, kind: type[T], expected: str) -> T | None:
    """`value`, the option `name`, as it is: of a `kind`, or None. Else a ConfigError."""
    if value is None or isinstance(value, kind):
        return value
    raise ConfigError(f"got {name}={value!r:.200}, expected {expected}")


def unmatched_frozen_names(trainable: Mapping[str, bool], runs: Sequence[Trajectory]) -> list[str]:
    """Names set to False that match no turn of `runs`; for one set to True, a ConfigError."""
    names = {name for run in runs for turn in run.turns for name in turn.names}
    unmatched = sorted(trainable.keys() - names)
    if unknown := [repr(name) for name in unmatched if trainable[name]]:
        known = [repr(name) for name in sorted(names)]
        more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
        raise ConfigError(
            f"trainable: {', '.join(unknown)} is the name of no model call among the "
            f"{len(runs)} runs of the first batch, so it would train nothing. Its calls are named "
            f"{', '.join(known[:_SHOWN]) or 'nothing: no model call was recorded'}{more}."
        )
    return unmatched


@dataclass(frozen=True)
class Schedule:
    """The arguments of `Trainer.fit`, where each is documented.

    Raises:
        ConfigError: a number is out of range, or `stop_early` has less than two scenarios or no
            `eval_every`.
    """

    steps: int
    eval_scenarios: Sequence[Any] = ()
    eval_every: int | None = None
    eval_samples: int = 1
    stop_early: int | None = None

    def __post_init__(self) -> None:
        for name, least in {"steps": 0, "eval_samples": 1, "eval_every": 1}.items():
            value = getattr(self, name)
            if value is not None or name != "eval_every":
                object.__setattr__(self, name, check_count(value, name, least))
        stop_early, held_out = self.stop_early, len(self.eval_scenarios)
        if not held_out and (self.eval_every is not None or self.eval_samples != 1):
            raise ConfigError(
                f"got eval_every={self.eval_every}, eval_samples={self.eval_samples} and no "
                "eval_scenarios, of whose evaluations they are"
            )
        if stop_early is not None and (stop_early < 1 or held_out < 2):
            raise ConfigError(
                f"got {stop_early=} with {held_out} eval_scenarios, expected a positive number of "
                "evaluations, and at least two scenarios"
            )
        if stop_early is not None and self.eval_every is None:
            raise ConfigError(
                f"got {stop_early=} without eval_every: a fit is evaluated before and after alone "
                "then. Give eval_every, the steps between two evaluations"
            )

    def evaluates(self, step: int) -> bool:
        """True before the first step, after the last, and every `eval_every` steps."""
        every = self.eval_every or self.steps or 1
        return bool(self.eval_scenarios) and (step % every == 0 or step >= self.steps)

    def seconds_left(
        self, step: int, trained: int, elapsed: float, evals: Sequence[float]
    ) -> float:
        """Seconds from the end of `step`, which is not evaluated yet, to that of the fit.

        `elapsed` for the `trained` steps until now and the evaluations that took `evals` seconds.
        """
        per_step = (elapsed - sum(evals)) / trained
        to_come = sum(map(self.evaluates, range(step, self.steps + 1)))
        per_eval = sum(evals) / len(evals) if evals else 0.0
        return per_step * (self.steps - step) + per_eval * to_come
