"""Held-out scenarios before and after a command has trained a policy."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_art.analytics.analysis import by_scenario
from langchain_art.cli.load_rollout import load_scenarios, rollout_of
from langchain_art.cli.options import say, stderr
from langchain_art.errors import ConfigError
from langchain_art.statistics.intervals import PairedTest, paired_test
from langchain_art.training.records import EvalResult
from langchain_art.wire import Trajectory
from langchain_art.wire.trajectories import EVALUATION

if TYPE_CHECKING:
    from langchain_art.client.sync_client import ArtClient


Evaluated = tuple[EvalResult, list[Trajectory]]
"""The result on one version, and its runs, which the server keeps."""


class HeldOut:
    """A rollout and scenarios of the command line, on which a policy is evaluated twice."""

    def __init__(
        self,
        rollout: str,
        scenarios: str,
        policy: str,
        *,
        client: ArtClient,
        samples: int,
        root: Path,
    ) -> None:
        """Load both.

        Args:
            rollout: ``MODULE:FUNCTION``.
            scenarios: a JSONL file, or ``MODULE:NAME``.
            policy: by its name, so that each evaluation is of the version that serves.
            client: of the server.
            samples: runs per scenario.
            root: the folder of the policy's fits, whose settings hold if the rollout has none.

        Raises:
            ConfigError: one cannot be loaded.
        """
        from langchain_art.training.trainer import Trainer

        self._rollout = rollout_of(rollout, policy, client.base_url, root)
        self._scenarios = load_scenarios(scenarios)
        self._client, self._samples = client, samples
        self._trainer = Trainer(policy, client=client, console=stderr)

    def evaluate(self) -> Evaluated:
        """The mean reward of the version that serves."""
        result = asyncio.run(
            self._trainer.evaluate(self._rollout, self._scenarios, samples=self._samples)
        )
        return result, stored_runs(self._client, result)

    def compare(self, before: Evaluated) -> None:
        """Evaluate again, and print both and the difference.

        Raises:
            ConfigError: no scenario has a reward in both.
        """
        (old, then), (new, now) = before, self.evaluate()
        say(f"held-out reward before: {old.version}: {old}")
        say(f"held-out reward after:  {new.version}: {new}")
        found = difference(then, now)
        spread = "" if found.ci95 is None else f" ± {found.ci95:.3f}"
        say(f"held-out change: {found.difference:+.3f}{spread} (p = {found.p_value:.4f})")


def stored_runs(client: ArtClient, result: EvalResult) -> list[Trajectory]:
    """The runs of an evaluation that has just ended: the newest that are marked as of its version.

    Raises:
        ConfigError: some are gone.
    """
    wanted = limit = result.n + result.failed + result.unscored
    while True:
        newest = client.trajectories(limit)
        own = [run for run in newest if run.metadata.get(EVALUATION) == result.version][:wanted]
        if len(own) == wanted:
            return own
        if len(newest) < limit:
            raise ConfigError(
                f"got {len(own)} stored runs of the evaluation of {result.version}, expected "
                f"{wanted}; let nothing delete runs while it goes on"
            )
        limit *= 2


def difference(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> PairedTest:
    """The change of the mean reward, scenario by scenario (`paired_test`).

    Raises:
        ConfigError: no scenario has a reward in both.
    """
    first, second = _means(before), _means(after)
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ConfigError(
            f"got {len(first)} scenarios with a reward before and {len(second)} after, none in "
            "both; let the rollout give each run a reward"
        )
    return paired_test([second[name] - first[name] for name in shared])


def _means(runs: Sequence[Trajectory]) -> dict[str, float]:
    return {name: statistics.fmean(rewards) for name, rewards in by_scenario(runs).items()}
