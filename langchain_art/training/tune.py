"""Short probes of several learning rates, each from the version that serves."""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ConfigError
from langchain_art.statistics.intervals import clear_of_chance
from langchain_art.training.addresses import roll_back, serving_version
from langchain_art.training.fit_loop import FitLoop
from langchain_art.training.fit_settings import Schedule
from langchain_art.training.fit_state import History
from langchain_art.training.identity import identity_of
from langchain_art.training.learning_rates import choose_rate
from langchain_art.training.progress import Display
from langchain_art.training.records import EvalResult, Record, StepRecord
from langchain_art.training.report import duration
from langchain_art.training.run_setup import Setup
from langchain_art.wire.train_config import MAX_LEARNING_RATE

#: Of the rates that are tried if none are named, over the fit's own.
_FACTORS = (1 / 3, 1.0, 3.0)


class RateProbe(Record):
    """Results of a few steps at one learning rate."""

    learning_rate: float
    mean: float | None
    """Mean reward: held out after the last step, or of the last step's runs. None: no rewards."""
    ci95: float | None
    collapsed: str = ""
    """Reason for which the probe ended before its steps did (`training.collapse`); empty: it
    did not."""

    def __str__(self) -> str:
        spread = "" if self.ci95 is None else f" ± {self.ci95:.3f}"
        return "no rewards" if self.mean is None else f"{self.mean:.3f}{spread}"


class TuneResult(Record):
    """The probes of `Trainer.tune`, in the order of their rates.

    Example::

        tuned = trainer.tune_sync(rollout, train, rates=[1e-3, 3e-3])
        tuned.best, tuned.why       # 0.003, "0.71 ± 0.05 is above 0.43 ± 0.06 (0.001) by more …"
    """

    probes: tuple[RateProbe, ...]
    held_out: bool
    """True if rewards are those of held-out scenarios."""
    best: float | None
    """The rate to take; None: all collapsed, or nothing had a reward."""
    clear: bool
    """True if its mean is above all others' by more than the 95 % interval of the difference."""
    why: str
    runs: int
    tokens: dict[str, int]
    """``prompt`` and ``completion`` (sampled) of all runs."""
    seconds: float


def chosen(probes: Sequence[RateProbe]) -> tuple[float | None, bool, str]:
    """The rate to take, whether that is clear, and why, in words.

    The highest mean of those that did not collapse, the lower rate of equals. It is clear if every
    other mean is lower by more than √(ci95² + ci95²), the interval of a difference.
    """
    whole = [one for one in probes if not one.collapsed and one.mean is not None]
    if not whole:
        return None, False, "No rate was left: each probe collapsed or had no rewards."
    first = max(whole, key=lambda one: (one.mean or 0.0, -one.learning_rate))
    near = [one for one in whole if one is not first and not _is_below(one, first)]
    if near:
        others = ", ".join(f"{one} ({one.learning_rate:.2g})" for one in near)
        why = (
            f"{first} is the highest mean, but not clear of {others}: more steps, groups_per_step "
            "or eval_scenarios would tell them apart."
        )
        return first.learning_rate, False, why
    others = ", ".join(f"{one} ({one.learning_rate:.2g})" for one in whole if one is not first)
    if not others:
        return first.learning_rate, False, f"{first}: there is no other rate to compare it with."
    why = f"{first} is above {others} by more than the 95 % interval of the difference."
    return first.learning_rate, True, why


def _is_below(one: RateProbe, first: RateProbe) -> bool:
    return clear_of_chance((first.mean or 0.0) - (one.mean or 0.0), one.ci95, first.ci95)


def check_rates(rates: Sequence[float] | None, steps: int) -> None:
    """ConfigError if they make no sense."""
    if steps < 2:
        raise ConfigError(f"got {steps=}, expected at least 2 for each probe")
    if rates is None:
        return
    wrong = [rate for rate in rates if not 0 < rate <= MAX_LEARNING_RATE]
    if wrong or not rates or len(set(rates)) < len(rates):
        raise ConfigError(
            f"got rates={list(rates)}, expected distinct ones above 0 and at most "
            f"{MAX_LEARNING_RATE:g}, such as [1e-5, 3e-5, 1e-4]"
        )


async def tune(
    setup: Setup,
    scenarios: Sequence[Any],
    rates: Sequence[float] | None,
    steps: int,
    eval_scenarios: Sequence[Any],
) -> TuneResult:
    """Run `Trainer.tune`, once its arguments are checked."""
    begun = time.monotonic()
    plan, client, display = setup.plan, setup.client, setup.display
    common, *others = plan.configs.values()
    if any(one != common for one in others):
        raise ConfigError(
            f"got configs that differ for {' and '.join(plan.learning)}, expected one config, "
            "whose learning rates are compared; tune one policy after the other, with None for the "
            "others"
        )
    began = {name: await serving_version(client, name, plan.lora) for name in plan.learning}
    kept = {name: await client.checkpoints(name) for name in plan.learning}
    known = {name: {one.version for one in some} for name, some in kept.items()}
    if rates is None:
        own = await choose_rate(client, plan.learning, common, display)
        rates = [min(MAX_LEARNING_RATE, own * factor) for factor in _FACTORS]
    rates = sorted(set(rates))
    probes: list[RateProbe] = []
    history: list[StepRecord] = []
    evals: list[EvalResult] = []
    with display.bar("tuning", len(rates) * steps) as advance:
        for rate in rates:
            config = common.model_copy(update={"learning_rate": rate})
            configs = dict.fromkeys(plan.configs, config)
            tried = replace(plan, configs=configs, on_collapse="stop")

            def told(record: StepRecord, rate: float = rate) -> None:
                mean = "no rewards" if record.reward_mean is None else f"{record.reward_mean:.3f}"
                advance(f"{rate:.2g}: reward {mean}")

            silent = Display(Console(file=io.StringIO(), force_jupyter=False))
            quiet = replace(setup, plan=tried, display=silent)
            with tempfile.TemporaryDirectory(prefix="langchain-art-tune-") as folder:
                try:
                    identity = identity_of(tried, {}, setup.rollout, scenarios, ())
                    files = History(Path(folder), identity)
                    found = await FitLoop(quiet, files, Schedule(steps), told).run(scenarios)
                    history += found.history
                    if eval_scenarios:
                        evals.append(await quiet.evaluate(eval_scenarios, samples=1))
                    last = evals[-1] if eval_scenarios else None
                finally:
                    await _restore(client, began, known)
            step = found.history[-1]
            mean = step.reward_mean if last is None else last.mean
            ci95 = step.reward_ci95 if last is None else last.ci95
            probe = RateProbe(learning_rate=rate, mean=mean, ci95=ci95, collapsed=found.stopped)
            probes.append(probe)
            display.line(f"{rate:.2g}: {probe}{', collapsed' if probe.collapsed else ''}")
    best, clear, why = chosen(probes)
    names = " and ".join(f"{name}@{version}" for name, version in began.items())
    display.line(f"{names} serves as before; the versions of the probes are deleted.")
    counted = [*history, *evals]
    return TuneResult(
        probes=tuple(probes),
        held_out=bool(eval_scenarios),
        best=best,
        clear=clear,
        why=why,
        runs=sum((one.groups + one.resampled) * plan.group_size for one in history)
        + sum(one.n + one.failed + one.unscored for one in evals),
        tokens={
            kind: sum(one.tokens.get(kind, 0) for one in counted)
            for kind in ("prompt", "completion")
        },
        seconds=time.monotonic() - begun,
    )


async def _restore(
    client: AsyncArtClient, began: dict[str, int], known: dict[str, set[int]]
) -> None:
    """Let the policies serve what they did, and delete what a probe made."""
    silent = Display(Console(file=io.StringIO(), force_jupyter=False))
    for name, version in began.items():
        await roll_back(client, [name], silent, version)
        for one in await client.checkpoints(name):
            if one.version not in known[name]:
                if one.pinned:  # by the probe, as by any fit
                    await client.unpin(name, one.version)
                await client.delete_checkpoint(name, one.version)


def tune_table(result: TuneResult) -> Group:
    """The probes, the rate to take, and what it cost."""
    right = [Column(name, justify="right") for name in ("learning rate", "mean reward")]
    table = Table(*right, Column("", overflow="fold"), box=None)
    for probe in result.probes:
        mark = probe.collapsed and f"collapsed: {probe.collapsed}"
        if probe.learning_rate == result.best:
            mark = "take this one" if result.clear else "the highest, not clear"
        table.add_row(f"{probe.learning_rate:.2g}", str(probe), mark)
    cost = f"{result.runs} runs, {result.tokens['completion']} tokens sampled"
    of = "held-out scenarios" if result.held_out else "the last step's runs"
    return Group(
        table, Text(f"{result.why} Rewards are of {of}. {cost}, {duration(result.seconds)}.")
    )
