"""One adapter against two: ``python -m examples.codenames.compare``.

Both arms play the same games: two adapters learn on one role's calls each, a single one learns on
the calls of both. So the tokens that are trained on are as many, but for what the players say.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from examples.codenames.train import DEMO
from examples.support import command
from examples.support.demo import folder_of, run
from langchain_art import FitResult

ONE = replace(DEMO, policies=("player",), title=f"{DEMO.title}, one adapter")
Figures = Mapping[str, Any]


def tokens(result: FitResult, *_: object) -> dict[str, Any]:
    """For ``summary.json``: the number of sampled tokens that a fit was trained on."""
    return {"tokens_trained": sum(record.tokens.get("trained", 0) for record in result.history)}


def difference(two: Sequence[Figures], one: Sequence[Figures]) -> tuple[float, float]:
    """Held-out reward of two adapters less that of one, after training: the mean over the seeds.

    Args:
        two: what the summaries of the fits with two adapters hold.
        one: those with one adapter, in the same order.

    Returns:
        The difference, and the half-width of its 95 % interval over held-out boards, those of the
        fits combined as those of independent means.
    """
    arms = [[found["after"] for found in arm] for arm in (two, one)]
    of_two, of_one = (statistics.fmean(after["mean"] for after in arm) for arm in arms)
    spread = math.hypot(*(after["ci95"] for arm in arms for after in arm)) / len(two)
    return of_two - of_one, spread


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Fits of each arm: seeds 0, 1, ...")] = 3,
    steps: command.Steps = DEMO.steps,
) -> None:
    """Train two adapters and one on the same games, and compare their held-out rewards.

    Fits that are finished, the demo's among them, are not made again.
    """
    two: list[Figures] = []
    one: list[Figures] = []
    for seed in range(seeds):
        out = folder_of(DEMO, seed)
        two.append(run(DEMO, out=out, steps=steps, seed=seed, more=tokens))
        out = folder_of(DEMO, seed, "one")
        one.append(run(ONE, out=out, steps=steps, seed=seed, more=tokens))
    for name, arm in (("two adapters", two), ("one adapter", one)):
        rewards = ", ".join(f"{found['after']['mean']:.3f}" for found in arm)
        trained = sum(found["tokens_trained"] for found in arm)
        print(f"{name}: held-out reward {rewards}; {trained} tokens trained on")
    for seed, pair in enumerate(zip(two, one, strict=True)):
        found, spread = difference(pair[:1], pair[1:])
        print(f"seed {seed}: two adapters less one: {found:+.3f} ± {spread:.3f}")
    found, spread = difference(two, one)
    print(f"all seeds: two adapters less one: {found:+.3f} ± {spread:.3f}")


if __name__ == "__main__":
    typer.run(main)
