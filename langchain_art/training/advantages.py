"""A user's advantages (`Trainer(advantages=)`), and the server's plan as the client foresees it.

What the user's function returns is checked here, where it enters, and is sent with the step
(`TrainRequest.advantages`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from langchain_art._callables import call
from langchain_art.credit import candidates
from langchain_art.credit.batch_plan import BatchPlan, plan, unscored
from langchain_art.errors import ConfigError
from langchain_art.wire import TrainConfig, Trajectory, TrajectoryGroup, Turn
from langchain_art.wire.training import CallAdvantage, settings_of_rewards

AdvantageHook: TypeAlias = Callable[[TrajectoryGroup], Any]
"""Gives a list with an entry for each run of a group, in order; plain or async.

An entry is a number (of all tokens of the run), None (the run is not trained), or a list with an
entry for each of the run's `turns`: a number, None (not trained), or a list with a number for each
sampled token of the call. NumPy's arrays are lists.
"""
RunAdvantages: TypeAlias = tuple[CallAdvantage | None, ...]

_CALL: TypeAdapter[CallAdvantage | None] = TypeAdapter(CallAdvantage | None)


def check_hook(hook: object, configs: Mapping[str, TrainConfig]) -> AdvantageHook | None:
    """`hook` as it is; a ConfigError if it is no function, or a config has what it replaces."""
    if hook is None:
        return None
    if not callable(hook):
        raise ConfigError(f"got advantages={hook!r:.200}, expected a function of a group of runs")
    if unread := next(filter(None, map(settings_of_rewards, configs.values())), ""):
        raise ConfigError(
            f"got advantages= together with TrainConfig({unread}=…), which would not be read: "
            "advantages= says what the advantages are; leave out one of the two"
        )
    return hook


async def advantages_of(hook: AdvantageHook, group: TrajectoryGroup) -> dict[str, RunAdvantages]:
    """Run's id -> the advantages of its turns; runs that are not trained are left out.

    Raises:
        ConfigError: what the function returned is not of the shape of `AdvantageHook`, or has a
            number that is not finite. What the function raises, it raises with the group's name.
    """
    try:
        found = _listed(await call(hook, group))
    except Exception as error:
        error.add_note(f"raised by advantages= for the group {group.id!r}")
        raise
    runs = group.trajectories
    if not isinstance(found, list) or len(found) != len(runs):
        raise _wrong(
            f"the group {group.id!r}", found, f"a list with one entry for each of {_n(runs, 'run')}"
        )
    given = {run.id: _of_run(run, one) for run, one in zip(runs, found, strict=True)}
    return {name: one for name, one in given.items() if one is not None}


def _of_run(run: Trajectory, found: Any) -> RunAdvantages | None:
    where, found = f"the run {run.id!r}", _listed(found)
    if found is None:
        return None
    if not isinstance(found, list):
        return (_of_call(where, found),) * len(run.turns)
    if len(found) != len(run.turns):
        raise _wrong(
            where, found, f"a number, None, or one entry for each of {_n(run.turns, 'turn')}"
        )
    given = [_of_call(f"turn {k} of {where}", _listed(one)) for k, one in enumerate(found)]
    for k, (turn, one) in enumerate(zip(run.turns, given, strict=True)):
        tokens = turn.usage.completion_tokens if turn.usage is not None else None
        if isinstance(one, Sequence) and tokens not in (None, len(one)):
            expected = f"a number, None, or one for each of its {tokens} sampled tokens"
            raise _wrong(f"turn {k} of {where}", list(one), expected)
    return tuple(given)


def _of_call(where: str, found: Any) -> CallAdvantage | None:
    try:
        return _CALL.validate_python(found)
    except ValidationError as error:
        raise _wrong(where, found, "finite numbers of at most 1e9 either way") from error


def _listed(found: Any) -> Any:
    """Sequences and NumPy's and torch's arrays as lists."""
    if hasattr(found, "tolist"):
        return found.tolist()
    return list(found) if isinstance(found, Sequence) and not isinstance(found, str) else found


def _n(several: Sequence[object], name: str) -> str:
    return f"{len(several)} {name}{'' if len(several) == 1 else 's'}"


def _wrong(where: str, found: Any, expected: str) -> ConfigError:
    got = f"{len(found)} entries, {found!r:.200}" if isinstance(found, list) else f"{found!r:.200}"
    return ConfigError(f"advantages of {where}: got {got}, expected {expected}")


def expected_plan(
    group: TrajectoryGroup,
    policy: str,
    config: TrainConfig,
    trainable: Mapping[str, bool],
    advantages: Mapping[str, RunAdvantages] | None = None,
) -> BatchPlan:
    """The decisions on a group's calls in a step of `policy`, and what is excluded.

    The server alone knows how a call was sampled, by how old a version, and which prompts are equal
    token by token. Here every call can be trained, none is stale, and all were asked in one state:
    so no group is excluded that the server would train.
    """
    runs = [
        candidates.candidate_run(
            run, (_call(turn, policy, trainable) for turn in run.turns), advantages
        )
        for run in group.trajectories
    ]
    return plan([runs], config, given=advantages is not None)


def group_has_zero_variance(
    group: TrajectoryGroup,
    policy: str,
    config: TrainConfig,
    trainable: Mapping[str, bool],
    advantages: Mapping[str, RunAdvantages] | None = None,
) -> bool:
    """True if the server would exclude the whole group, because its runs have equal rewards."""
    excluded = expected_plan(group, policy, config, trainable, advantages).excluded
    return any(reason.startswith("groups.") for reason in excluded)


def may_teach(
    group: TrajectoryGroup, policies: Iterable[str], trainable: Mapping[str, bool]
) -> bool:
    """True if a call of a group may be trained on, whatever its runs' rewards are."""
    return any(
        _call(turn, policy, trainable).excluded_because is None
        for policy in policies
        for run in group.trajectories
        for turn in run.turns
    )


def is_rewarded(run: Trajectory, config: TrainConfig) -> bool:
    """True if a run has what is learned from: a reward, a call's reward, or all chosen scores."""
    calls = (candidates.candidate_call(turn, True, {}) for turn in run.turns)
    return unscored(candidates.candidate_run(run, calls), config.scores) is None


def _call(turn: Turn, policy: str, trainable: Mapping[str, bool]) -> candidates.CandidateCall:
    """A call whose model or usage is not known counts as one of the policy with one token."""
    sampled_by = ((turn.model or "").partition("@")[0] or policy) if turn.ours else None
    return replace(
        candidates.candidate_call(turn, sampled_by == policy, trainable),
        tokens=1 if turn.usage is None else turn.usage.completion_tokens,
        excluded_because=candidates.why_excluded(turn, sampled_by, policy, trainable),
        prompt=(),
    )
