"""Reaction of a fit to a collapse of its policy: say it, go back, or stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from langchain_art.errors import NotFound
from langchain_art.training.collapse import Sign, held_out_sign, names_of, new_signs
from langchain_art.training.fit_state import History
from langchain_art.training.records import EvalResult, Rollback, StepRecord, rates_in_words, scaled
from langchain_art.training.run_setup import Setup

#: By which the learning rate is multiplied at each rollback.
SLOWER = 1 / 3
#: Rollbacks after which a fit goes on; after the next one it ends.
MOST_ROLLBACKS = 3


@dataclass
class Recovery:
    """Looks at each new record of a fit, and acts as `Trainer(on_collapse=)` says."""

    setup: Setup
    history: History
    on_rollback: Callable[[Rollback], None]

    def __post_init__(self) -> None:
        self.plan, self.client = self.setup.plan, self.setup.client
        self.display = self.setup.display

    async def complete(self) -> None:
        """Do what a crash left undone of a rollback: some policies may not be rolled back yet."""
        last = self.history.last
        if not isinstance(last, Rollback):
            return
        former = [one for one in self.history.rollbacks if one.step == last.step]
        served = [self.history.steps[-1].versions, *(one.versions for one in former)]
        for policy, version in last.versions.items():
            serving = (await self.client.policy(policy)).version
            if serving != version and serving in [one[policy] for one in served]:
                await self.client.rollback(policy, version, last.why)
                self.display.warn(f"{policy} is rolled back to @{version}: {last.why}")
        self._stop_after_too_many(last)

    async def look(self, *, at_end: bool) -> bool:
        """Look at the last line of the history; whether the policies were rolled back.

        `at_end`: whether the fit ends here, if they are not.

        Raises:
            NotFound: no version that they could go back to is kept.
        """
        history, last = self.history, self.history.last
        if history.state.stopped:
            return False
        if isinstance(last, StepRecord):
            signs = new_signs(history.kept, self.plan.max_steps_ahead, self.plan.configs)
        elif isinstance(last, EvalResult):
            sign = held_out_sign(history.kept_evals, history.kept, at_end=at_end)
            signs = [sign] if sign else []
        else:
            return False
        undoing = self.plan.on_collapse == "rollback"
        for sign in signs:
            advice = "" if sign.keep is not None and undoing else f" {sign.advice}"
            self.display.warn(sign.words + advice)
        harmful = [sign for sign in signs if sign.keep is not None]
        if not harmful or self.plan.on_collapse == "warn":
            return False
        if self.plan.on_collapse == "stop":
            self.stop(f"{harmful[0].words} {harmful[0].advice}")
            return False
        await self._roll_back(harmful[0])
        return True

    def stop(self, why: str) -> None:
        """End the fit, for good."""
        self.history.save(stopped=why)
        self.display.warn(f"The fit ends after step {self.history.done}: {why}")

    async def _roll_back(self, sign: Sign) -> None:
        history, display = self.history, self.display
        keep, versions = await self._newest_good(sign.keep or 0)
        rate = history.rates(self.plan.configs)
        done = Rollback(
            step=history.done,
            to_step=history.kept[keep - 1].step if keep else 0,
            versions=versions,
            learning_rate=scaled(rate, SLOWER),
            why=sign.words,
        )
        discarded = [one.step for one in history.kept[keep:]]
        history.append(done)  # before it is done: a resumed fit completes it
        self.on_rollback(done)
        for policy, version in versions.items():
            await self.client.rollback(policy, version, sign.words)
        display.warn(
            f"Rolled back to {names_of(done.versions)}, as it was after step {done.to_step}: the "
            f"versions of {'steps' if len(discarded) > 1 else 'step'} "
            f"{', '.join(map(str, discarded))} are discarded. The learning rate is "
            f"{rates_in_words(done.learning_rate)} from here on, and was {rates_in_words(rate)} "
            f"(rollback {len(history.rollbacks)} of {MOST_ROLLBACKS} at most)."
        )
        self._stop_after_too_many(done)

    def _stop_after_too_many(self, last: Rollback) -> None:
        if (times := len(self.history.rollbacks)) <= MOST_ROLLBACKS:
            return
        self.stop(
            f"it was rolled back {times} times, at last with a learning rate of "
            f"{rates_in_words(scaled(last.learning_rate, 1 / SLOWER))}; "
            f"{names_of(last.versions)} serves, the last good "
            "version. Try TrainConfig(optimizer_steps=1, max_kl=0.01), more groups a step, and "
            "look at what the runs of the discarded steps were rewarded for (`langchain-art runs`)."
        )

    async def _newest_good(self, most: int) -> tuple[int, dict[str, int]]:
        """Number of steps to keep, `most` at most, so that their versions are on the server."""
        history = self.history
        kept_there = {
            policy: {one.version for one in await self.client.checkpoints(policy)}
            for policy in self.plan.learning
        }
        began_with = {name: history.state.began_with[name] for name in self.plan.learning}
        good = [began_with, *(one.versions for one in history.kept[:most])]
        for keep in range(len(good) - 1, -1, -1):
            if all(version in kept_there[policy] for policy, version in good[keep].items()):
                return keep, good[keep]
        raise NotFound(
            f"The policy is to be rolled back, and none of the versions up to {good[-1]} is kept, "
            "to which it could go back. Let the server keep more (`keep_checkpoints`), and begin "
            'with fit(…, fresh=True); or train with Trainer(on_collapse="warn").'
        )
