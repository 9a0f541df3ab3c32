"""Runs to figures, as values: by version, by node, by action, and their errors."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from langchain_art._notebook import view_html
from langchain_art.errors import ConfigError
from langchain_art.evaluators.run_facts import TOOL_ERRORS
from langchain_art.evaluators.transcript import text_of, tool_calls
from langchain_art.statistics.costs import (
    NodeFigures,
    busy_seconds,
    in_order,
    known_sum,
    node_figures,
    prices,
)
from langchain_art.statistics.intervals import Comparison, Rewards, compare_rewards, wilson
from langchain_art.training.records import summarize, tokens
from langchain_art.wire import Message, Trajectory, Turn
from langchain_art.wire.identifiers import Frozen
from langchain_art.wire.redaction import redact
from langchain_art.wire.trajectories import EVALUATION


class VersionFigures(Frozen):
    """The runs of one version, or of one set of versions that work together."""

    version: str
    """``email-agent@17``, or ``critic@2 + writer@3``; ``-`` for runs without a model call."""
    runs: int
    evaluated: int
    """Runs of evaluations on held-out scenarios; the others are of training or use."""
    scenarios: int
    """Different ones; a run without a scenario is one of its own."""
    failed: int
    unscored: int
    """Runs that did not fail and have no reward. They are in neither rate nor mean."""
    successes: int
    success_rate: float | None
    """Share of the scored and the failed runs."""
    success_low: float | None
    success_high: float | None
    """Wilson's 95 % interval (`intervals.wilson`), over runs as if they were independent."""
    reward_mean: float | None
    """Mean of the scored runs' total returns."""
    reward_ci95: float | None
    """Half width, 1.96 · s/√n over scenarios, as `EvalResult.ci95`."""
    calls_mean: float
    """Model calls of a run."""
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None
    """Cost of the calls with a known price; None if no price is known."""


class ActionFigures(Frozen):
    """Number of times a node did something."""

    node: str
    action: str
    """The name of a tool; ``(answer)``: a reply that calls none."""
    count: int
    share: float
    """Fraction of the node's actions."""


class ErrorPattern(Frozen):
    """Errors that read alike once ids, numbers, quotations and paths are left out."""

    where: Literal["run", "call", "tool"]
    """``tool``: a tool's result that begins as LangGraph's ToolNode begins an error."""
    name: str
    """The node, or the tool; ``-`` of a run."""
    pattern: str
    count: int
    runs: int
    example: str
    """The id of a run that has it."""


class Analysis(Frozen):
    """Figures of some runs.

    Example::

        found = analyze(client.trajectories(1000), success=1.0)
        found.versions[-1].success_rate, found.versions[-1].success_low
    """

    runs: int
    success: float
    """The total return from which on a run counts as a success."""
    versions: tuple[VersionFigures, ...]
    """Versions in the order of their numbers."""
    nodes: tuple[NodeFigures, ...]
    actions: tuple[ActionFigures, ...]
    errors: tuple[ErrorPattern, ...]
    """The most frequent first."""
    busy_seconds: float
    """Seconds in which at least one call of our server ran, as far as its latency is known."""
    notes: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        return view_html("analytics.report:analysis_view", self)


#: The action of a reply that calls no tool.
ANSWER = "(answer)"
#: The total return from which on a run is a success, unless another one is given.
SUCCESS = 0.5
Costs = Mapping[int, float | None]


def analyze(
    runs: Iterable[Trajectory], *, success: float = SUCCESS, gpu_rate: float | None = None
) -> Analysis:
    """Compute the figures of runs, by version and node, with intervals.

    Args:
        runs: as the server has them (``client.trajectories(1000)``), or any others.
        success: a run whose total return is at least this is a success.
        gpu_rate: US dollars an hour of our own server, for the cost of its calls. None: that cost
            is not counted.

    Raises:
        ConfigError: `gpu_rate` is negative, or a number is not finite.
    """
    if gpu_rate is not None and not 0 <= gpu_rate < math.inf:
        raise ConfigError(f"got {gpu_rate=}, expected US dollars an hour, at least 0")
    if not math.isfinite(success):
        raise ConfigError(f"got {success=}, expected the reward from which on a run is a success")
    found = list(runs)
    turns = [turn for run in found for turn in run.turns]
    costs, notes = prices(turns, gpu_rate)
    by_turn = {id(turn): cost for turn, cost in zip(turns, costs, strict=True)}
    by_version = defaultdict[str, list[Trajectory]](list)
    for run in found:
        by_version[version_of(run)].append(run)
    return Analysis(
        runs=len(found),
        success=success,
        versions=tuple(
            _version(version, by_version[version], success, by_turn)
            for version in sorted(by_version, key=in_order)
        ),
        nodes=node_figures(turns, costs),
        actions=_actions(turns),
        errors=error_patterns(found),
        busy_seconds=busy_seconds(turns),
        notes=tuple(notes),
    )


def version_of(run: Trajectory) -> str:
    """The versions that a run was sampled from: ``critic@2 + writer@3``; ``-`` of none.

    Models that our server does not serve count only where a run has no other.
    """
    ours = {turn.model for turn in run.turns if turn.model and turn.ours}
    named = ours or {turn.model for turn in run.turns if turn.model}
    evaluated = run.metadata.get(EVALUATION)
    return " + ".join(sorted(named)) or (evaluated if isinstance(evaluated, str) else "-")


def by_scenario(runs: Iterable[Trajectory]) -> dict[str, list[float]]:
    """Scenario -> the total returns of its scored runs; without a scenario, a run's own id."""
    found = defaultdict[str, list[float]](list)
    for run in runs:
        if (worth := run.total_return) is not None:
            found[_scenario(run)].append(worth)
    return dict(found)


def _scenario(run: Trajectory) -> str:
    return run.scenario if run.scenario is not None else f"run {run.id}"


def _version(
    version: str, runs: Sequence[Trajectory], success: float, costs: Costs
) -> VersionFigures:
    apart = [run.model_copy(update={"scenario": _scenario(run)}) for run in runs]
    summary = summarize(apart, step=None, versions=(version,), seconds=0.0)
    worth = [run.total_return for run in runs]
    successes = sum(one is not None and one >= success for one in worth)
    judged = summary.n + summary.failed
    low, high = wilson(successes, judged) if judged else (None, None)
    spent = tokens(runs)
    return VersionFigures(
        version=version,
        runs=len(runs),
        evaluated=sum(EVALUATION in run.metadata for run in runs),
        scenarios=len({run.scenario for run in apart}),
        failed=sum(run.status == "failed" for run in runs),
        unscored=summary.unscored,
        successes=successes,
        success_rate=successes / judged if judged else None,
        success_low=low,
        success_high=high,
        reward_mean=summary.mean,
        reward_ci95=summary.ci95,
        calls_mean=statistics.fmean(len(run.turns) for run in runs),
        prompt_tokens=spent["prompt"],
        completion_tokens=spent["completion"],
        cost_usd=known_sum(costs[id(turn)] for run in runs for turn in run.turns),
    )


def _actions(turns: Iterable[Turn]) -> tuple[ActionFigures, ...]:
    counted = defaultdict[str, Counter[str]](Counter)
    for turn in turns:
        if turn.reply is not None and turn.excluded_because is None:
            called = [name for name, _ in tool_calls(turn.reply)]
            counted[turn.label].update(called or [ANSWER])
    return tuple(
        ActionFigures(node=node, action=action, count=count, share=count / counts.total())
        for node, counts in sorted(counted.items())
        for action, count in counts.most_common()
    )


def compare(runs: Iterable[Trajectory], before: str, after: str) -> Comparison:
    """Test if the runs of version `after` have higher rewards than those of `before`.

    By `statistics.intervals.compare_rewards`: in pairs, where both have runs of same scenarios.

    Args:
        runs: of both versions, and of others, which are not looked at.
        before: as in `VersionFigures.version`: ``email-agent@0``.
        after: likewise.

    Raises:
        ConfigError: there is no scored run of one of them.
    """
    found = list(runs)
    rewards: list[Rewards] = []
    for version in (before, after):
        rewards.append(by_scenario(run for run in found if version_of(run) == version))
        if not rewards[-1]:
            known = sorted({version_of(run) for run in found})
            raise ConfigError(
                f"got the version {version!r}, expected one with scored runs among the "
                f"{len(found)} that were read; their versions: {', '.join(known) or 'none'}"
            )
    return compare_rewards(before, after, *rewards)


_LENGTH = 160
#: What differs between messages of one kind, and what stands in its place; the order matters.
_VARYING = (
    (re.compile(r"\b[a-z][\w+.-]*://\S+"), "<url>"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"(['\"`])(?:(?!\1).){1,200}\1"), "<text>"),
    (re.compile(r"(?<![\w<])(?:[A-Za-z]:)?[\\/](?:[\w.-]+[\\/])+[\w.-]*"), "<path>"),
    (re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b(?:call|chatcmpl|run|req)[-_][\w-]{6,}"), "<id>"),
    (re.compile(r"(?<![\w<])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE), "<n>"),
)


def normalised(message: str) -> str:
    """A message in one line, without ids, numbers, quotations, paths, addresses and secrets.

    Example: ``Timeout after 31 s at 'mail-7'`` becomes ``Timeout after <n> s at <text>``.
    """
    text = " ".join(redact(message).split())
    for varying, instead in _VARYING:
        text = varying.sub(instead, text)
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"


def error_patterns(runs: Iterable[Trajectory]) -> tuple[ErrorPattern, ...]:
    """Errors of runs, calls and tools, grouped; the most frequent first."""
    counted = Counter[tuple[Literal["run", "call", "tool"], str, str]]()
    seen_in = defaultdict[tuple[str, str, str], dict[str, None]](dict)
    for run in runs:
        for where, name, message in _errors(run):
            key = (where, name, normalised(message))
            counted[key] += 1
            seen_in[key][run.id] = None
    return tuple(
        ErrorPattern(
            where=where,
            name=name,
            pattern=pattern,
            count=count,
            runs=len(seen_in[where, name, pattern]),
            example=next(iter(seen_in[where, name, pattern])),
        )
        for (where, name, pattern), count in counted.most_common()
    )


def _errors(run: Trajectory) -> Iterator[tuple[Literal["run", "call", "tool"], str, str]]:
    if run.error:
        yield "run", "-", run.error
    tools: dict[str, str] = {}
    answered: set[str] = set()
    for turn in run.turns:
        if turn.error:
            yield "call", turn.label, turn.error
        for message in turn.messages:  # a prompt that is no continuation repeats earlier results
            tools |= _called(message)
            called = str(message.get("tool_call_id") or "")
            text = text_of(message.get("content"))
            failed = message.get("role") == "tool" and text.startswith(TOOL_ERRORS)
            if failed and called not in answered:
                yield "tool", str(message.get("name") or tools.get(called, "-")), text
            if called:
                answered.add(called)
        tools |= _called(turn.reply or {})


def _called(message: Message) -> dict[str, str]:
    return {
        str(call.get("id")): str((call.get("function") or {}).get("name"))
        for call in message.get("tool_calls") or ()
    }
