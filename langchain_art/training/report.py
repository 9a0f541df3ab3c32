"""Reports of a step or a fit: its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.markup import escape
from rich.table import Column, Table

from langchain_art.training.collapse.signs import names_of
from langchain_art.training.results.fit_result import FitResult
from langchain_art.training.results.records import EvalResult, StepRecord
from langchain_art.wire import NodeReport
from langchain_art.wire.exclusions import meaning


def summary_table(result: FitResult) -> Table:
    """A fit in a few rows."""
    steps = f"{len(result.history)} step{'' if len(result.history) == 1 else 's'}"
    title = f"{' and '.join(result.versions)}: {steps}"
    table = Table(Column(style="bold"), Column(overflow="fold"), title=title, show_header=False)
    for row in _held_out_rows(result):
        table.add_row(*row)
    rewards = [r.reward_mean for r in result.history if r.reward_mean is not None]
    if rewards:
        table.add_row("training reward", f"{rewards[0]:.3f} first step, {rewards[-1]:.3f} last")
    for one in result.rollbacks:
        back = names_of(one.versions)
        table.add_row("rolled back", f"after step {one.step}, to {back}: {one.why}")
    if result.stopped:
        table.add_row("ended early", result.stopped)
    if own := sum(record.own_advantages for record in result.history):
        table.add_row("advantages", f"of {own} steps given by Trainer(advantages=…)")
    table.add_row("excluded", excluded_counts(result) or "nothing")
    if resampled := sum(record.resampled for record in result.history):
        groups = sum(record.groups for record in result.history)
        table.add_row(
            "resampled", f"{resampled} of {groups} groups, in place of zero-variance ones"
        )
    if passed := sum(record.passed_over for record in result.history):
        drawn = sum(record.groups for record in result.history)
        table.add_row(
            "difficulty",
            f"{passed} of {passed + drawn} turns passed over, of scenarios whose runs fared alike; "
            f"at last {pool_counts(result.history[-1].pools)}",
        )
    in_steps = sum(record.seconds.get("total", 0.0) for record in result.history)
    table.add_row("time", f"{duration(in_steps)} in steps, {duration(result.seconds)} in all")
    prompts, sampled = (result.tokens.get(name, 0) for name in ("prompt", "completion"))
    learned = sum(report.tokens for report in result.nodes.values())
    table.add_row("tokens", f"{prompts} read, {sampled} sampled, {learned} trained")
    if result.judge_cost is not None:
        table.add_row("judge", f"${result.judge_cost:.4f}")
    best = result.best.versions if result.best else ()
    chosen = {name.partition("@")[0]: name for name in best}
    for policy, version in result.versions.items():
        newest = f"{policy}@{version}"
        name = chosen.get(policy, newest)
        beside = "" if name == newest else f'  the best; the newest is "{newest}"'
        if not learned:
            beside = "  as it was: NOTHING was trained"
        table.add_row("use it as", f'ChatART(model="{name}"){beside}')
    return table


def node_table(
    nodes: Mapping[str, NodeReport], title: str, rewards: Mapping[str, str] | None = None
) -> Table:
    """Table of nodes: their calls' rewards if any has one, what was trained, and excluded calls."""
    node, excluded = Column("node", overflow="fold"), Column("calls excluded", overflow="fold")
    names = [*(["reward"] if rewards else []), "calls", "tokens", "mean |A|", "mean A"]
    numbers = [Column(name, justify="right") for name in names]
    table = Table(node, *numbers, excluded, title=title, title_justify="left")
    for name, report in nodes.items():
        mean = round(report.advantage_mean, 3) + 0.0  # never -0.000
        advantages = [f"{report.advantage_abs:.3f}", f"{mean:+.3f}"]
        table.add_row(
            escape(name),
            *([rewards.get(name, "-")] if rewards else []),
            str(report.calls),
            str(report.tokens),
            *(advantages if report.tokens else ["-", "-"]),
            escape(counts(report.excluded)) or "-",
        )
    return table


def node_rewards(history: Sequence[StepRecord]) -> dict[str, str]:
    """Mean reward by node, of its calls in the first step that has one, and in the last."""
    found: dict[str, list[float]] = {}
    for record in history:
        for name, reward in record.rewards_by_node.items():
            found.setdefault(name, []).append(reward)
    return {
        name: f"{rewards[0]:.3f}" if len(rewards) == 1 else f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
        for name, rewards in found.items()
    }


def _held_out_rows(result: FitResult) -> Iterator[tuple[str, str]]:
    evals = {"held out before": result.before, "held out after": result.after, "best": result.best}
    for name, found in evals.items():
        if found is not None:
            yield name, f"{found}  {found.version}"
            if found.best_of:
                yield "", best_of_runs(found)


def best_of_runs(found: EvalResult) -> str:
    """``best of 1: 0.250, 2: 0.500``: the expected best reward of so many runs of a scenario."""
    known = (f"{k}: {reward:.3f}" for k, reward in found.best_of.items())
    return f"best of {', '.join(known)} (pass@k where rewards are 0 and 1)"


def pool_counts(pools: Mapping[str, int]) -> str:
    """``mixed 12, easy 30, hard 8``: scenarios by difficulty pool, without empty pools."""
    return ", ".join(f"{name} {count}" for name, count in pools.items() if count)


def duration(seconds: float) -> str:
    """``4.1s``, ``3m05s`` or ``2h07m``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def counts(found: Mapping[str, int]) -> str:
    """``reason 3, other 1``, the most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in _most_frequent(found))


def _most_frequent(found: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))


def excluded_counts(found: StepRecord | FitResult) -> str:
    """Counts of what was excluded, by reason; calls that another policy trained are not counted."""
    strange = any("other_policy" in report.excluded for report in found.nodes.values())
    hidden = () if strange else ("/calls.other_policy",)
    return counts({k: n for k, n in found.excluded.items() if not k.endswith(hidden)})


def nothing_trained(record: StepRecord) -> list[str]:
    """A warning with reasons for each policy that a step trained on nothing; else empty.

    Example::

        step 1 trained email-agent on NOTHING; it stays at email-agent@0. Why:
          16 groups.zero_variance: all runs of a group have the same reward, so none is better
    """
    lines: list[str] = []
    for policy, result in record.results.items():
        if any(report.tokens for report in result.nodes.values()):
            continue
        name = f"{policy}@{result.version}"
        lines.append(f"step {record.step} trained {policy} on NOTHING; it stays at {name}. Why:")
        for reason, count in _most_frequent(result.excluded):
            lines.append(f"  {count} {reason}: {meaning(reason)}")
        if record.unjudged:
            lines.append(f"  {record.unjudged} groups.unjudged: {meaning('groups.unjudged')}")
    return lines
