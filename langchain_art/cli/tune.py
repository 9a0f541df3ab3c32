"""The command that compares learning rates."""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from langchain_art.cli.fits import Root
from langchain_art.cli.options import AsJson, BaseUrl, client_of, show
from langchain_art.errors import ConfigError


def tune(
    rollout: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="The rollout.")],
    scenarios: Annotated[str, typer.Argument(help="To learn from: a JSONL file, or MODULE:NAME.")],
    policy: Annotated[str, typer.Option(help="The policy, which is left as it is.")],
    rates: Annotated[
        str | None,
        typer.Option(metavar="RATE,RATE,...", help="Left out: a fit's own, a third, three times."),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Of each probe.")] = 5,
    held_out: Annotated[
        str | None, typer.Option(help="Scenarios to compare the rates by, as SCENARIOS.")
    ] = None,
    group_size: Annotated[int, typer.Option(min=2, help="Runs per scenario and step.")] = 8,
    groups_per_step: Annotated[int, typer.Option(min=1, help="Scenarios per step.")] = 16,
    root: Root = Path("out"),
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Try several learning rates for a few steps each, and say which one to take.

    Each probe begins at the version that serves, on the same scenarios in the same order. Then the
    policy goes back to it, and the versions of the probe are deleted. Use a policy that serves
    nobody meanwhile. A rate is clear if its mean reward is above all others' by more than the 95 %
    interval of the difference; what it cost is said.

    \b
    Examples:
      langchain-art tune my_agent:rollout train.jsonl --policy email-agent
      langchain-art tune my_agent:rollout train.jsonl --policy email-agent \\
        --rates 1e-5,3e-5,1e-4 --held-out held_out.jsonl
    """
    from langchain_art.cli.load_rollout import load_rollout, load_scenarios
    from langchain_art.training.trainer import Trainer
    from langchain_art.training.tune import tune_table

    chosen = None if rates is None else _numbers(rates)
    loaded = load_rollout(rollout, policy, base_url, root)
    train = load_scenarios(scenarios)
    others = [] if held_out is None else load_scenarios(held_out)
    stderr = Console(stderr=True)
    for note in loaded.notes:
        stderr.print(note, style="bold red", markup=False, highlight=False, soft_wrap=True)
    with client_of(base_url) as client:
        trainer = Trainer(
            policy,
            client=client,
            group_size=group_size,
            groups_per_step=groups_per_step,
            console=stderr,
        )
        found = asyncio.run(
            trainer.tune(loaded.rollout, train, rates=chosen, steps=steps, eval_scenarios=others)
        )
    show(found, as_json, tune_table)


def _numbers(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"got --rates {text}, expected numbers with commas, such as 1e-5,3e-5,1e-4"
        ) from error
