"""Tables of the command line."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from langchain_art import wire
from langchain_art.evaluators.transcript import tool_calls
from langchain_art.training.records import tokens
from langchain_art.wire.training import meaning
from langchain_art.wire.trajectories import EVALUATION

if TYPE_CHECKING:
    from langchain_art.diagnostics.canary import CanaryReport

#: Characters of a message that a run's view shows; all of it is in ``--json``.
_EXCERPT = 600
#: What a version learned from: metrics of its job and how they are written.
_LEARNED = (("reward_mean", ".3f"), ("runs_trained", ".0f"), ("tokens_trained", ".0f"))


def status_table(status: wire.ServerStatus) -> Table:
    """The server's status."""
    title = f"langchain-art server {status.version}"
    table = Table(Column(style="bold"), Column(overflow="fold"), title=title, show_header=False)
    why = "".join(f"; {part}: {reason}" for part, reason in status.reasons.items())
    table.add_row("ready", "yes" if status.ready else escape(f"no{why}"))
    table.add_row("base model", escape(f"{status.base_model} ({status.model_path})"))
    table.add_row("parameters", f"{status.parameters:,} in {status.dtype} on {status.device}")
    table.add_row("context", f"{status.max_model_len} tokens")
    table.add_row("engines", f"{status.sampler} samples, {status.learner} learns")
    for one in status.replicas:
        missing = f", {one.missing} versions missing" if one.missing else ""
        state = one.problem or f"{one.running_calls} calls running{missing}"
        table.add_row(f"replica {one.name}", escape(f"{state}, {one.restarts} restarts"))
    table.add_row("restarts", str(status.engine_restarts))
    sampler = "no answer" if status.sampler_pause is None else f"{status.sampler_pause:.3f} s"
    table.add_row("longest pauses", f"gateway {status.gateway_pause:.3f} s, sampler {sampler}")
    for policy in status.policies:
        shape = f"rank {policy.lora.rank}, {policy.checkpoints} versions kept"
        table.add_row("policy", f"{policy.name}@{policy.version}  ({shape})")
    table.add_row("calls", f"{status.calls:,} kept, {status.running_calls} running")
    table.add_row("runs", f"{status.trajectories:,}")
    jobs = ", ".join(f"{count} {state}" for state, count in sorted(status.jobs.items()))
    table.add_row("jobs", jobs or "none")
    if status.rollouts or status.workers:
        known = [f"{n} {state}" for state, n in sorted(status.rollouts.items())]
        table.add_row("rollouts", ", ".join(known) or "none put up")
    for worker in status.workers:
        failed = f" ({worker.failed} failed)" if worker.failed else ""
        ended = f", {worker.expired} leases expired" if worker.expired else ""
        table.add_row(
            "worker",
            escape(
                f"{worker.name}  {worker.rollout}: {worker.leased} of {worker.slots} leased, "
                f"{worker.finished} finished{failed}{ended}, heard {worker.heard_seconds:.0f} s ago"
            ),
        )
    table.add_row("stored", f"{status.stored_bytes / 1e6:,.1f} MB")
    if status.free_bytes is not None:
        little = " (little)" if status.free_bytes < 4 * status.min_free_bytes else ""
        least = f"at least {status.min_free_bytes / 1e6:,.1f} MB are needed"
        table.add_row("disk", f"{status.free_bytes / 1e6:,.1f} MB free{little}, {least}")
    table.add_row("up for", f"{status.uptime:.0f} s")
    return table


def checkpoints_table(checkpoints: Sequence[wire.Checkpoint]) -> Table:
    """Versions of a policy; all their metrics are in ``--json`` and in the exported card."""
    names = ("version", "from", "made (UTC)", "size", "reward", "runs", "tokens", "state")
    table = _plain(names, cut="version")
    for one in checkpoints:
        made = datetime.fromtimestamp(one.created_at, UTC).strftime("%m-%d %H:%M")
        state = [word for word, on in (("serves", one.serving), ("pinned", one.pinned)) if on]
        if one.rolled_back is not None:
            state.append(f"rolled back to @{one.rolled_back.to}")
        learned = [_or_dash(one.metrics.get(metric), form) for metric, form in _LEARNED]
        parent = "-" if one.parent is None else f"@{one.parent}"
        size = f"{one.bytes / 1e6:.1f} MB"
        table.add_row(one.name, parent, made, size, *learned, " ".join(state))
    return table


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def runs_table(runs: Sequence[wire.Trajectory]) -> Table:
    """One line per run, with as much of its id as tells it from the others."""
    names = ("id", "scenario", "status", "reward", "turns", "tokens", "versions")
    table = _plain(names, cut="scenario")
    shown = _telling({run.id for run in runs})
    for run in runs:
        spoken = tokens([run])
        known = any(turn.usage for turn in run.turns)
        table.add_row(
            escape(run.id[:shown]),
            Text(run.scenario or "-", no_wrap=True, overflow="ellipsis"),
            _status(run),
            _or_dash(run.total_return, ".3f"),
            str(len(run.turns)),
            f"{spoken['prompt']} + {spoken['completion']}" if known else "-",
            escape(" ".join(sorted({turn.model for turn in run.turns if turn.model})) or "-"),
        )
    return table


def run_view(run: wire.Trajectory) -> Group:
    """One run: for each turn the messages that its prompt added, and what was said."""
    scores = "".join(f", {name} {value:.3f}" for name, value in run.scores.items())
    lines = [Text(f"{run.id}  {run.scenario or ''}  {_outcome(run)}{scores}", style="bold")]
    for index, turn in enumerate(run.turns):
        lines += [Text(), Text(_about(index, turn), style="bold")]
        for message in turn.messages:
            lines.append(_line(str(message.get("role", "?")), spoken(message)))
        if turn.reply is not None or turn.error:
            lines.append(_line("reply", " ".join(filter(None, [spoken(turn.reply), turn.error]))))
    if run.error:
        lines += [Text(), Text(f"error: {run.error}", style="red")]
    return Group(*lines)


def _about(index: int, turn: wire.Turn) -> str:
    """Turn 1, after turn 0: node, version, tokens, seconds."""
    parts = [f"turn {index}" + ("" if turn.extends is None else f", after turn {turn.extends}")]
    attempt = f" attempt {turn.attempt}" if turn.attempt > 1 else ""
    excluded = f" ({turn.excluded_because})" if turn.excluded_because else ""
    parts += [f"{turn.label}{attempt}{excluded}", turn.model or "-"]
    if usage := turn.usage:
        parts.append(f"{usage.prompt_tokens} + {usage.completion_tokens} tokens")
    if turn.latency is not None:
        parts.append(f"{turn.latency:.2f} s")
    if turn.reward is not None:
        parts.append(f"reward {turn.reward:.3f}")
    return "  ".join(parts)


def _line(who: str, text: str) -> Text:
    more = len(text) - _EXCERPT
    shown = text if more <= 0 else f"{text[:_EXCERPT]}… ({more:,} more characters: --json)"
    return Text.assemble((f"  {who}: ", "dim"), shown)


def _status(run: wire.Trajectory) -> str:
    """The status in a word; of an evaluation's run, that it is one."""
    if EVALUATION not in run.metadata:
        return run.status
    return "eval" if run.status == "completed" else f"eval {run.status}"


def _plain(names: Sequence[str], cut: str) -> Table:
    """A table that 80 columns hold: without frames, and with one column that may be cut."""
    columns = (Column(name, no_wrap=name != cut) for name in names)
    return Table(*columns, box=box.SIMPLE_HEAD, padding=0, show_edge=False)


def _telling(ids: Collection[str]) -> int:
    """Number of characters, at least eight, that tell these ids apart."""
    most = max(map(len, ids), default=0)
    return next((n for n in range(8, most) if len({one[:n] for one in ids}) == len(ids)), most)


def _outcome(run: wire.Trajectory | wire.TrajectoryAudit) -> str:
    worth = run.total_return if isinstance(run, wire.Trajectory) else run.reward
    return f"{run.status}, " + ("not scored" if worth is None else f"reward {worth:.3f}")


def audit_table(audit: wire.TrajectoryAudit) -> Table:
    """Table of which of a run's tokens are trained: a line per turn, and the totals."""
    names = ("#", "node", "version", "prompt", "sampled", "trained", "prefix", "why not")
    numbers = {"#", "prompt", "sampled", "trained"}
    table = Table(
        *(Column(n, justify="right" if n in numbers else "left", overflow="fold") for n in names),
        title=escape(f"{audit.trajectory}  {_outcome(audit)}"),
        caption=escape("\n".join([_totals(audit), *_reasons(audit)])),
        caption_justify="left",
    )
    for index, turn in enumerate(audit.turns):
        table.add_row(
            str(index),
            escape(turn.label),
            escape(turn.model or "-"),
            str(turn.prompt_tokens),
            str(turn.sampled_tokens),
            str(turn.trained_tokens),
            _prefix(turn),
            escape(turn.excluded_because or "-"),
        )
    return table


def canary_table(report: CanaryReport) -> Table:
    """The checks of a canary, its verdict below them."""
    where = f"{report.base_model} in {report.dtype} on {report.device}, {report.base_url}"
    verdict = "the server can be trained on" if report.passed else "do not train on this server yet"
    caption = f"{verdict} ({report.seconds:.0f} s). Left there: {report.left}."
    table = Table(
        "check",
        "measured",
        "expected",
        "",
        title=escape(f"Canary: {where}"),
        caption=escape(caption),
        caption_style="bold green" if report.passed else "bold red",
    )
    for check in report.checks:
        passed = "[green]ok[/]" if check.passed else "[bold red]FAILED[/]"
        table.add_row(check.name, escape(check.measured), escape(check.bar), passed)
    return table


def _reasons(audit: wire.TrajectoryAudit) -> list[str]:
    found = {turn.excluded_because for turn in audit.turns if turn.excluded_because}
    return [f"{reason}: {meaning(reason)}" for reason in sorted(found)]


def _prefix(turn: wire.TurnAudit) -> str:
    if turn.prefix is None:
        return "-"
    if turn.prefix_turn is None:
        return turn.prefix
    return f"{turn.prefix} {turn.prefix_turn} after {turn.prefix_tokens}"


_NOT_TRAINED = (
    "Not trained yet; runs of an evaluation, or of a group whose rewards are all equal, never are."
)


def _totals(audit: wire.TrajectoryAudit) -> str:
    done = ", ".join(f"{policy} (job {job})" for policy, job in audit.trained_by.items())
    return (
        f"{audit.trained_tokens} of {audit.sampled_tokens} sampled tokens learn, in {audit.rows} "
        f"{'row' if audit.rows == 1 else 'rows'}. "
        f"{f'Trained by {done}.' if done else _NOT_TRAINED}"
    )


def spoken(message: wire.Message | None) -> str:
    """A message in one line: its content, and its tool calls."""
    parts: list[str] = []
    if content := (message or {}).get("content"):
        parts.append(content if isinstance(content, str) else json.dumps(content))
    parts += [f"{name}({arguments})" for name, arguments in tool_calls(message)]
    return " ".join(" ".join(parts).split())


def keys_table(keys: Sequence[wire.ApiKey]) -> Table:
    """Keys with their state and limits."""
    names = ("tenant", "name", "scopes", "limits", "state")
    table = Table(Column("id", no_wrap=True), *(Column(name, overflow="fold") for name in names))
    for key in keys:
        limits = [f"{name} {value}" for name, value in key.limits if value is not None]
        row = (key.tenant, key.name, " ".join(key.scopes), ", ".join(limits) or "-", _state(key))
        table.add_row(key.id, *map(escape, row))
    return table


def _state(key: wire.ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {_when(key.revoked_at)}"
    if key.expires_at is None:
        return "valid"
    return f"{'valid until' if time.time() < key.expires_at else 'expired'} {_when(key.expires_at)}"


def log_table(actions: Sequence[wire.LoggedAction]) -> Table:
    """Entries of the log."""
    table = Table("when", "tenant", "key", "action", Column("what", overflow="fold"))
    for one in actions:
        row = (one.tenant, one.key or "-", one.action.replace("_", " "), one.subject)
        table.add_row(_when(one.at), *map(escape, row))
    return table


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
