"""`langchain-art review train`: a policy learns from what people said, and what that changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from langchain_art.cli.options import BaseUrl, client_of, say, stderr
from langchain_art.errors import ConfigError, JobFailed
from langchain_art.export.ids import HUMAN_REWARD
from langchain_art.wire.reviews import FATES
from langchain_art.wire.train_config import MAX_LEARNING_RATE

if TYPE_CHECKING:
    from langchain_art.client.sync_client import ArtClient
    from langchain_art.training.records import EvalResult
    from langchain_art.wire import ReviewPlan, TrainJob, TrainResult

ScoreName = Annotated[str, typer.Option(help="The score that people give.")]


def train(
    policy: Annotated[str, typer.Argument(help="The policy that learns.")],
    name: ScoreName = HUMAN_REWARD,
    criterion: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=WEIGHT", help="In place of --name, a part of a reward; may be repeated."
        ),
    ] = None,
    min_agreement: Annotated[
        float, typer.Option(max=1, help="Reviewers who agree no more than this abstain.")
    ] = 0.0,
    learning_rate: Annotated[
        float | None,
        typer.Option(min=1e-9, max=MAX_LEARNING_RATE, help="Left out: that of TrainConfig."),
    ] = None,
    correction_steps: Annotated[
        int, typer.Option(min=1, max=100, help="Preference steps on the corrections.")
    ] = 4,
    held_out_too: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="A held-out scenario, or run, to train; may be repeated."),
    ] = None,
    rollout: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="To evaluate with, before and after."),
    ] = None,
    scenarios: Annotated[
        str | None, typer.Option(help="Held out, of --rollout: a JSONL file, or MODULE:NAME.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Runs per scenario. Left out: 1.")
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="Fits, whose settings --rollout may need. Left out: out.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be trained, and train nothing.")
    ] = False,
    base_url: BaseUrl = None,
) -> None:
    """Train a policy on the rewards that people gave its runs, and on their corrections.

    Rewards: one step, in which reviewed runs of one scenario are compared with each other, and
    reviewed calls with those of the same node.
    Corrections: preference steps (DPO) with the corrected reply against the sampled one, on the
    same prompt tokens. Each verdict is trained once; one that changed, with its new value. What is
    left out is counted: scenarios that an evaluation ran are held out. What the corrected cases are
    answered now is shown. With --rollout and --scenarios, as `langchain-art eval` takes them, the
    mean reward is measured before and after.

    \b
    Examples:
      langchain-art review train email-agent --dry-run
      langchain-art review train email-agent
      langchain-art review train email-agent --rollout my_agent:rollout --scenarios held_out.jsonl
    """
    from langchain_art.wire import PreferenceConfig, ReviewTraining, TrainConfig

    rate: dict[str, Any] = {} if learning_rate is None else {"learning_rate": learning_rate}
    asked = ReviewTraining(
        policy=policy,
        name=name,
        criteria=dict(named_number("--criterion", one, "tone=0.3") for one in criterion or ()),
        min_agreement=min_agreement,
        held_out_too=tuple(held_out_too or ()),
        config=TrainConfig(credit="call", **rate),
        preference=PreferenceConfig(**rate),
        correction_steps=correction_steps,
    )
    with client_of(base_url) as client:
        evaluate = _evaluation(client, policy, rollout, scenarios, samples, root)
        plan = client.plan_reviews(asked)
        if asked.weights != {HUMAN_REWARD: 1.0} and not plan.counted("reward"):
            reviews = client.reviews(policy=policy)
            given = sorted({one.name for one in reviews if one.kind != "correction"})
            raise ConfigError(
                f"got the scores {[*asked.weights]}, expected some that people gave runs of "
                f"{policy!r}: {given}"
            )
        for line in plan_lines(plan):
            say(line)
        if not plan.groups and not plan.pairs:
            say("nothing to train on: review several runs of one scenario, or correct a reply")
            raise typer.Exit(1)
        if dry_run:
            return
        before = None if evaluate is None else evaluate()
        jobs = client.train_reviews(asked.model_copy(update={"plan": plan.digest}))
        found = [_ended(client, job) for job in jobs]
        results = [one for one in found if not isinstance(one, JobFailed)]
        steps = [one for one in found[bool(plan.groups) :] if not isinstance(one, JobFailed)]
        for result in [*results[: len(results) - len(steps)], *steps[:1]]:
            for reason, count in sorted(result.excluded.items()):
                say(f"  excluded: {count} {reason}")
        _say_moved(steps)
        if results:
            say(f"{policy}@{results[-1].version} serves")
        if failed := [str(one) for one in found if isinstance(one, JobFailed)]:
            raise JobFailed("\n".join(failed))
        if evaluate is not None and before is not None:
            _say_change(before, evaluate())
        show_answers(client, plan, policy)


def _ended(client: ArtClient, job: TrainJob) -> TrainResult | JobFailed:
    try:
        return client.wait(job)
    except JobFailed as failed:  # the jobs behind it run all the same
        return failed


def plan_lines(plan: ReviewPlan) -> Iterator[str]:
    """The plan in words: what is trained, and what is left out and why."""
    beside = sum(len(values) for one in plan.compared for values in one.values())
    yield (
        f"{len(plan.rewards)} runs and {len(plan.turns)} single calls of {len(plan.groups)} "
        "scenarios are trained on"
        + (f", beside {beside} verdicts that they are compared with" if beside else "")
    )
    yield from _left_out(plan, "reward")
    yield f"{len(plan.pairs)} corrected replies are trained on"
    yield from _left_out(plan, "correction")
    for node, one in plan.nodes.items():
        yield f"  {node}: {one.calls} calls by rewards, {one.corrections} corrections"


def _left_out(plan: ReviewPlan, kind: Literal["reward", "correction"]) -> Iterator[str]:
    for fate, count in plan.counted(kind).most_common():
        if fate != "trains":
            mine = [one for one in plan.verdicts if (one.kind, one.fate) == (kind, fate)]
            versions = dict.fromkeys(name for one in mine for name in one.trained)
            saw = f" ({', '.join(versions)})" if versions else ""
            yield f"  left out: {count} {kind}s: {FATES[fate]}{saw}"


def _evaluation(
    client: ArtClient,
    policy: str,
    rollout: str | None,
    scenarios: str | None,
    samples: int | None,
    root: Path | None,
) -> Callable[[], EvalResult] | None:
    """Evaluates the version that serves on held-out scenarios; None: it is not asked for."""
    if rollout is None or scenarios is None:
        given = {"rollout": rollout, "scenarios": scenarios, "samples": samples, "root": root}
        if alone := [f"--{name} {value}" for name, value in given.items() if value is not None]:
            raise ConfigError(
                f"got {', '.join(alone)}, expected --rollout and --scenarios together: what is "
                "evaluated before and after, and on what"
            )
        return None
    from langchain_art.cli.load_rollout import load_scenarios, rollout_of
    from langchain_art.training.trainer import Trainer

    loaded = rollout_of(rollout, policy, client.base_url, root or Path("out"))
    held_out, trainer = load_scenarios(scenarios), Trainer(policy, client=client, console=stderr)
    return lambda: trainer.evaluate_sync(loaded, held_out, samples=samples or 1)


def _say_change(before: EvalResult, after: EvalResult) -> None:
    from langchain_art.training.records import compared

    say(f"held-out reward before: {before.version}: {before}")
    say(f"held-out reward after:  {after.version}: {after}")
    if not before.scenarios or not after.scenarios:
        raise ConfigError("got no rewards to compare; let the rollout give each run a reward")
    found = compared(before, after)
    spread = "" if found.ci95 is None else f" ± {found.ci95:.3f}"
    say(f"held-out change: {found.difference:+.3f}{spread} (p = {found.p_value:.4f})")


def _say_moved(steps: Sequence[TrainResult]) -> None:
    """Log-probabilities and loss of the pairs, before the first step and after the last."""
    if not steps or not steps[0].metrics.get("pairs_trained"):
        return
    first, last = steps[0].metrics, steps[-1].metrics
    for what in ("chosen_logprob", "rejected_logprob", "preference_loss"):
        moved = f"{first[what]:.3f} -> {last[f'{what}_after']:.3f}"
        say(f"{what}: {moved}, before the first step and after the last")


def show_answers(client: ArtClient, plan: ReviewPlan, policy: str) -> None:
    """Print how corrected calls are answered now; their messages are sent as they were."""
    from openai import OpenAIError

    from langchain_art.chat_models import ChatART
    from langchain_art.cli.tables import spoken

    model: Any = ChatART(model=policy, base_url=client.base_url)
    for chosen, rejected in plan.pairs[:5]:
        [better], [was] = client.trajectory(chosen).turns, client.trajectory(rejected).turns
        asked = {"messages": list(was.messages), "temperature": 0}
        asked |= {"tools": list(was.tools)} if was.tools else {}
        try:
            found = model.root_client.chat.completions.create(model=policy, **asked)
            now = spoken(found.choices[0].message.model_dump())[:200]
        except OpenAIError as error:  # what is trained stays trained
            now = f"not answered: {error}"
        say(f"call {was.call_id}:")
        say(f"  was:       {spoken(was.reply)[:200]}")
        say(f"  should be: {spoken(better.reply)[:200]}")
        say(f"  is now:    {now}")


def named_number(option: str, text: str, example: str) -> tuple[str, float]:
    """The name and the number of ``NAME=NUMBER``. Raises ConfigError."""
    name, _, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        name, number = "", 0.0
    if not name:
        raise ConfigError(f"got {option} {text}, expected NAME=NUMBER, such as {example}")
    return name, number
