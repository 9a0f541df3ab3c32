"""`langchain-art review train`: a policy learns from what people said, and what that changed."""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from langchain_art.cli.options import BaseUrl, client_of, console
from langchain_art.errors import ConfigError
from langchain_art.export.names import HUMAN_REWARD
from langchain_art.wire.train_config import MAX_LEARNING_RATE

if TYPE_CHECKING:
    from langchain_art.cli.held_out import HeldOut
    from langchain_art.client.sync_client import ArtClient
    from langchain_art.review.corrections import Corrected
    from langchain_art.wire import Message, TrainResult

#: Corrected cases whose answers are shown.
_MOST_SHOWN = 5
ScoreName = Annotated[str, typer.Option(help="The score that people give.")]


def train(
    policy: Annotated[str, typer.Argument(help="The policy that learns.")],
    name: ScoreName = HUMAN_REWARD,
    min_agreement: Annotated[
        float, typer.Option(max=1, help="Reviewers who agree no more than this abstain.")
    ] = 0.0,
    learning_rate: Annotated[
        float | None,
        typer.Option(min=1e-9, max=MAX_LEARNING_RATE, help="Left out: that of TrainConfig."),
    ] = None,
    beta: Annotated[
        float, typer.Option(min=1e-3, help="Of the preference steps: the larger, the closer.")
    ] = 0.1,
    correction_steps: Annotated[
        int, typer.Option(min=1, max=100, help="Preference steps on the corrections.")
    ] = 4,
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
    base_url: BaseUrl = None,
) -> None:
    """Train a policy on the rewards that people gave its runs, and on their corrections.

    Rewards: one step, in which reviewed runs of one scenario are compared with each other, and
    reviewed calls with those of the same node.
    Corrections: preference steps (DPO) with the corrected reply against the sampled one, on the
    same prompt tokens. What is left out is counted, and what the corrected cases are answered now
    is shown. With --rollout and --scenarios, as `langchain-art eval` takes them, the mean reward is
    measured before and after.

    \b
    Examples:
      langchain-art review train email-agent
      langchain-art review train email-agent --rollout my_agent:rollout --scenarios held_out.jsonl
    """
    from langchain_art.review import corrections
    from langchain_art.review.train import REASONS, order, read_plan
    from langchain_art.wire import PreferenceConfig, TrainConfig

    rate: dict[str, Any] = {} if learning_rate is None else {"learning_rate": learning_rate}
    with client_of(base_url) as client:
        held_out = _held_out(client, policy, rollout, scenarios, samples, root)
        reviews = client.reviews(policy=policy)
        planned = read_plan(client, reviews, name=name, min_agreement=min_agreement)
        corrected = corrections.read_corrections(client, reviews)
        say(
            f"{len(planned.rewards)} runs and {len(planned.turns)} single calls of "
            f"{len(planned.groups)} scenarios are trained on"
        )
        for reason, count in planned.left_out.most_common():
            say(f"  left out: {count} {REASONS[reason]}")
        say(f"{len(corrected.calls)} corrected replies are trained on")
        for reason, count in corrected.left_out.most_common():
            say(f"  left out: {count} {corrections.REASONS[reason]}")
        if not planned.groups and not corrected.calls:
            say("nothing to train on: review several runs of one scenario, or correct a reply")
            raise typer.Exit(1)
        before = None if held_out is None else held_out.evaluate()
        job = order(client, policy, planned, TrainConfig(credit="call", **rate))
        results = [] if job is None else [client.wait(job)]
        pairs = [one.pair for one in corrected.calls]
        config = PreferenceConfig(beta=beta, **rate)
        steps = [
            client.wait(client.prefer(pairs, policy, config))
            for _ in range(correction_steps if pairs else 0)
        ]
        for result in [*results, *steps[:1]]:
            for reason, count in sorted(result.excluded.items()):
                say(f"  excluded: {count} {reason}")
        _say_moved(steps)
        say(f"{policy}@{[*results, *steps][-1].version} serves")
        if held_out is not None and before is not None:
            held_out.compare(before)
        _show_answers(corrected.calls[:_MOST_SHOWN], policy, client.base_url)


def _held_out(
    client: ArtClient,
    policy: str,
    rollout: str | None,
    scenarios: str | None,
    samples: int | None,
    root: Path | None,
) -> HeldOut | None:
    if rollout is None or scenarios is None:
        given = {"rollout": rollout, "scenarios": scenarios, "samples": samples, "root": root}
        if alone := [f"--{name} {value}" for name, value in given.items() if value is not None]:
            raise ConfigError(
                f"got {', '.join(alone)}, expected --rollout and --scenarios together: what is "
                "evaluated before and after, and on what"
            )
        return None
    from langchain_art.cli.held_out import HeldOut

    return HeldOut(
        rollout,
        scenarios,
        policy,
        client=client,
        samples=samples or 1,
        root=root or Path("out"),
        say=say,
        console=Console(stderr=True),
    )


def _say_moved(steps: Sequence[TrainResult]) -> None:
    """Log-probabilities and loss of the pairs, before the first step and after the last."""
    if not steps or not steps[0].metrics.get("pairs_trained"):
        return
    first, last = steps[0].metrics, steps[-1].metrics
    for what in ("chosen_logprob", "rejected_logprob", "preference_loss"):
        moved = f"{first[what]:.3f} -> {last[f'{what}_after']:.3f}"
        say(f"{what}: {moved}, before the first step and after the last")


def _show_answers(calls: Sequence[Corrected], policy: str, base_url: str) -> None:
    """What corrected calls were answered, should have been, and are now (temperature 0)."""
    from langchain_art.chat_models import ChatART
    from langchain_art.tracing.message_log import wire_message

    model = ChatART(model=policy, base_url=base_url, temperature=0)
    for one in calls:
        asked = model.bind_tools(list(one.turn.tools)) if one.turn.tools else model
        now = asked.invoke(list(one.turn.messages))
        say(f"call {one.turn.call_id}:")
        say(f"  was:       {_text(one.turn.reply or {})}")
        say(f"  should be: {_text(one.reply)}")
        say(f"  is now:    {_text(wire_message(now))}")


def _text(reply: Message) -> str:
    calls = [call["function"] for call in reply.get("tool_calls") or ()]
    said = [f"{call['name']}({call['arguments']})" for call in calls]
    return " ".join([*str(reply.get("content") or "").split(), *said])[:200]


def say(line: str) -> None:
    """Print a line as it is."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
