"""Learn from a reviewer: ``python -m examples.email_search.review``.

That is what ``make demo REVIEW=scripted`` runs.
Forty runs of the base model are stored on a server, without rewards. The scripted reviewer reads
them and says what he thinks of them (`scripted_reviewer`), which is kept as reviews, as
``langchain-art review pull`` keeps what people say in Langfuse. Then the policy is trained as
``langchain-art review train`` trains it, by rewards and by corrections, and once more from the base
with as many steps by chance: rewards dealt out anew, pairs turned round by the toss of a coin. What
each is worth on held-out questions is printed at the end, by their right answers and by the marks
of the same reviewer, who is not told which version a run is of.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from examples.email_search.inbox import MailStore, Scenario, build
from examples.email_search.scripted_reviewer import review
from examples.email_search.train import BASE_MODEL, HELD_OUT, MAX_TOKENS, POLICY, make_rollout
from examples.support.demo import base_model_of
from langchain_art import (
    ArtClient,
    ArtError,
    ChatART,
    LocalServer,
    PreferenceConfig,
    TrainConfig,
    TrajectoryGroup,
    gather,
)
from langchain_art.cli.review_train import FATES
from langchain_art.statistics.intervals import DRAWS, quantile, sign_test
from langchain_art.wire import Review, ReviewPlan, ReviewTraining, TrainJob, Trajectory

QUESTIONS = 8
RUNS_EACH = 5
HELD_OUT_RUNS = 3
# Chosen on training questions of other seeds, on none of those that are held out.
REWARDS = TrainConfig(
    credit="call", learning_rate=1e-3, optimizer_steps=8, tokens_per_microbatch=4096
)
PREFERENCES = PreferenceConfig(learning_rate=2e-4, beta=0.1, tokens_per_microbatch=4096)
PREFERENCE_STEPS = 4


class Demo:
    """One policy of a server, and the questions of one seed."""

    def __init__(self, base_url: str, mails: MailStore, seed: int, policy: str = POLICY) -> None:
        """Use a server that has the base model; the policy is made there if it is new."""
        self._client, self._mails, self._seed = ArtClient(base_url), mails, seed
        self._policy = self._client.create_policy(policy).name
        model = ChatART(model=policy, base_url=base_url, max_tokens=MAX_TOKENS)
        self._rollout = make_rollout(model, mails, judged=True)

    def run(self) -> dict[str, Any]:
        """All of it; what ``summary.json`` holds."""
        base = self._client.policy(self._policy).version
        before, marks_before = self._held_out()
        said = self._review(self._sample())
        asked = ReviewTraining(
            policy=self._policy,
            config=REWARDS,
            preference=PREFERENCES,
            correction_steps=PREFERENCE_STEPS,
        )
        planned = self._client.plan_reviews(asked)
        learned = self._learned(self._client.train_reviews(asked))
        after, marks_after = self._held_out()
        self._client.rollback(self._policy, base)
        self._learned(self._by_chance(planned))
        control, _ = self._held_out()
        marks = Counter(one.value or 0.0 for one in said if one.kind == "reward")
        return {
            "seed": self._seed,
            "marks": {str(mark): marks[mark] for mark in sorted(marks, reverse=True)},
            "runs_trained": len(planned.rewards),
            "questions_trained": len(planned.groups),
            "runs_left_out": left_out(planned, "reward"),
            "corrections": sum(one.kind == "correction" for one in said),
            "corrections_trained": len(planned.pairs),
            "corrections_left_out": left_out(planned, "correction"),
            **learned,
            "held_out": len(before),
            "held_out_runs": HELD_OUT_RUNS,
            "before": figures(before),
            "after": figures(after),
            "control": figures(control),
            "after_minus_before": figures(minus(after, before)),
            "after_minus_control": figures(minus(after, control)),
            "control_minus_before": figures(minus(control, before)),
            "marks_before": figures(marks_before),
            "marks_after": figures(marks_after),
            "marks_after_minus_before": figures(minus(marks_after, marks_before)),
            "preference": preference(minus(marks_after, marks_before)),
        }

    def _sample(self) -> list[Trajectory]:
        """Runs of training questions, without a reward, as the server has stored them."""
        questions = self._mails.scenarios("train", QUESTIONS)
        groups = self._gathered(questions, RUNS_EACH)
        self._client.post_groups(groups)
        return [self._client.trajectory(run) for group in groups for run in group.trajectories]

    def _review(self, runs: Sequence[Trajectory]) -> list[Review]:
        """What the reviewer says of them, kept by the server and read back."""
        kept = self._client.put_reviews(self._said(runs, "train"))
        if kept.refused:
            raise ArtError(f"The server refused reviews: {kept.refused[:3]}")
        return self._client.reviews(policy=self._policy)

    def _said(self, runs: Sequence[Trajectory], split: Literal["train", "test"]) -> list[Review]:
        """Make the reviewer's reviews of runs of a split's questions."""
        inboxes = {one.id: self._mails.inbox(one.inbox) for one in self._mails.scenarios(split)}
        return [one for run in runs for one in review(run, inboxes[str(run.scenario)], time.time())]

    def _by_chance(self, planned: ReviewPlan) -> list[TrainJob]:
        """As many steps of the same kind, by rewards and pairs that chance has dealt."""
        dealt = by_chance(planned, self._seed)
        jobs: list[TrainJob] = []
        if dealt.groups:
            rewards = dealt.rewards
            jobs.append(self._client.train(dealt.groups, self._policy, REWARDS, rewards=rewards))
        for _ in range(PREFERENCE_STEPS if dealt.pairs else 0):
            jobs.append(self._client.prefer(dealt.pairs, self._policy, PREFERENCES))
        return jobs

    def _learned(self, jobs: Sequence[TrainJob]) -> dict[str, Any]:
        """Steps of jobs, what was excluded, and log-probabilities of the corrections."""
        done = [self._client.wait(job) for job in jobs]
        steps = [one for one in done if "pairs_trained" in one.metrics]
        results = [one for one in done if one not in steps]
        found: dict[str, Any] = {
            "optimizer_steps": len(results) * REWARDS.optimizer_steps + len(steps),
            "excluded": dict(sum((Counter(one.excluded) for one in [*results, *steps]), Counter())),
        }
        if steps:
            first, last = steps[0].metrics, steps[-1].metrics
            found["chosen_logprob"] = [first["chosen_logprob"], last["chosen_logprob_after"]]
        return found

    def _held_out(self) -> tuple[dict[str, float], dict[str, float]]:
        """Measure the serving version: by question, the means of its runs' rewards and marks."""
        questions: list[Scenario] = self._mails.scenarios("test")
        rewards: dict[str, float] = {}
        marks: dict[str, float] = {}
        for group in self._gathered(questions, HELD_OUT_RUNS):
            said = self._said(group.trajectories, "test")
            given = [one.value or 0.0 for one in said if one.kind == "reward"]
            question = str(group.trajectories[0].scenario)
            marks[question] = statistics.fmean(given)
            rewards[question] = statistics.fmean(run.reward or 0.0 for run in group.trajectories)
        if len(rewards) != len(questions):
            raise ArtError(f"got {len(rewards)} held-out questions, expected {len(questions)}")
        return rewards, marks

    def _gathered(self, questions: Sequence[Scenario], runs_each: int) -> list[TrajectoryGroup]:
        """Runs of the version that serves. Raises ArtError if one failed."""
        done = asyncio.run(
            gather(
                self._rollout,
                questions,
                group_size=runs_each,
                concurrency=128,
                seed=self._seed,
            )
        )
        if done.failed:
            raise ArtError(f"{done.failed} runs failed, the first with: {done.first_error}")
        return done.groups


def by_chance(planned: ReviewPlan, seed: int) -> ReviewPlan:
    """The control: the same rewards dealt out at random, and each pair turned round or not."""
    rng = random.Random(f"control-{seed}")
    dealt = rng.sample(list(planned.rewards.values()), len(planned.rewards))
    rewards = dict(zip(planned.rewards, dealt, strict=True))
    pairs = tuple(one if rng.random() < 0.5 else (one[1], one[0]) for one in planned.pairs)
    return planned.model_copy(update={"rewards": rewards, "pairs": pairs})


def minus(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The difference, question by question."""
    return {question: one[question] - other[question] for question in one}


def preference(differences: Mapping[str, float]) -> dict[str, float]:
    """The questions in which the reviewer marks the runs after higher, lower, and the sign test."""
    won = sum(one > 0 for one in differences.values())
    lost = sum(one < 0 for one in differences.values())
    return {"won": won, "lost": lost, "p_value": sign_test(won, lost)}


def figures(rewards: Mapping[str, float]) -> dict[str, float]:
    """The mean and its 95 % interval, bootstrapped over the questions."""
    values = list(rewards.values())
    low, high = bootstrap(values)
    return {"mean": statistics.fmean(values), "low": low, "high": high}


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of a mean: the percentile bootstrap (Efron 1979, Annals of Statistics 7).

    10,000 samples are drawn, each of as many of the values, with replacement.
    """
    chance = random.Random(seed)
    means = sorted(statistics.fmean(chance.choices(values, k=len(values))) for _ in range(DRAWS))
    return quantile(means, 0.025), quantile(means, 0.975)


def left_out(planned: ReviewPlan, kind: Literal["reward", "correction"]) -> dict[str, int]:
    """Why verdicts are not trained on, in words -> how many."""
    counted = planned.counted(kind).most_common()
    return {FATES[fate]: count for fate, count in counted if fate != "trains"}


def lines(found: Mapping[str, Any]) -> list[str]:
    """The summary in words."""

    def listed(counts: Mapping[str, int]) -> str:
        return "".join(f"; left out: {count} {what}" for what, count in counts.items())

    marks = ", ".join(f"{count} with {mark}" for mark, count in found["marks"].items())
    excluded = ", ".join(f"{count} {reason}" for reason, count in found["excluded"].items())
    said = [
        f"{sum(found['marks'].values())} runs marked: {marks}",
        f"{found['corrections']} of them corrected, each in the first call that was wrong",
        f"rewards of {found['runs_trained']} runs of {found['questions_trained']} questions are "
        f"trained on{listed(found['runs_left_out'])}",
        f"{found['corrections_trained']} corrected replies are trained on"
        f"{listed(found['corrections_left_out'])}",
        f"{found['optimizer_steps']} optimizer steps; excluded: {excluded or 'nothing'}",
    ]
    if "chosen_logprob" in found:
        first, last = found["chosen_logprob"]
        said.append(
            f"log-probability of a corrected reply, in the preference steps: {first:.2f} -> "
            f"{last:.2f} nats"
        )
    said.append(
        f"held-out reward, seed {found['seed']}: {found['held_out']} questions, "
        f"{found['held_out_runs']} runs each, 95 % intervals:"
    )
    names = (
        ("before", "before"),
        ("after", "after"),
        ("as many random steps", "control"),
        ("after - before", "after_minus_before"),
        ("after - random", "after_minus_control"),
        ("random - before", "control_minus_before"),
        ("mark before", "marks_before"),
        ("mark after", "marks_after"),
        ("mark after - before", "marks_after_minus_before"),
    )
    for what, one in ((what, found[name]) for what, name in names):
        said.append(f"  {what:20} {one['mean']:6.3f} [{one['low']:.3f}, {one['high']:.3f}]")
    prefers = found["preference"]
    said.append(
        f"the reviewer prefers the runs after in {prefers['won']} of "
        f"{prefers['won'] + prefers['lost']} questions that he marks differently "
        f"(sign test: p = {prefers['p_value']:.2g})"
    )
    return said


def main(
    seed: Annotated[int, typer.Option(help="Of the mails and of the control")] = 0,
    out: Annotated[Path | None, typer.Option(help="Default: out/demo-review, by the seed")] = None,
    fresh: Annotated[bool, typer.Option(help="Do it again although it is finished")] = False,
) -> None:
    """Let a scripted reviewer mark and correct 40 runs, train on what he says, and measure.

    Finished and run again, it shows its result; stopped, it begins anew.
    """
    console = Console(soft_wrap=True, highlight=False)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out = out or Path("out", f"demo-seed{seed}-review" if seed else "demo-review")
    path = out / "summary.json"
    if fresh or not path.exists():
        shutil.rmtree(out / "server", ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        mails = MailStore(build(out / "mails.sqlite3", QUESTIONS, HELD_OUT, seed))
        base_model = base_model_of(BASE_MODEL)
        local = LocalServer(base_model, policies=[POLICY], data_dir=out / "server")
        with local:
            console.print(f"Server: {local.base_url}   log: {local.log}")
            found = Demo(local.base_url, mails, seed).run()
        mails.close()
        found["seconds"] = round(time.monotonic() - begun, 1)
        path.write_text(json.dumps(found, indent=2) + "\n")
    found = json.loads(path.read_text())
    if found["seed"] != seed:
        raise typer.BadParameter(f"{out} has the result of seed {found['seed']}; add --fresh")
    for line in lines(found):
        console.print(line, markup=False)
    console.print(f"{found['seconds']:.0f} s. Summary: {path}", markup=False)


if __name__ == "__main__":
    typer.run(main)
