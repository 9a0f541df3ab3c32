"""CPU seconds until the demo's agent answers three of four held-out questions: ours against others.

Every racer begins with the demo's base model and a new LoRA adapter (rank 16, all linear layers),
takes the same 16 questions in each step, eight runs of each, one optimizer step on them, and says
every three steps where its adapter is. Then it waits, while that adapter is merged into the base
model and the demo's own agent answers the held-out questions with it, through a server that is
started for it. Neither that time nor the racer's while it waits counts. A racer has arrived with
its first adapter that has a mean reward of 0.75.

- ours: `Trainer`, `ChatART` and a `LocalServer` (`racing.ours`);
- TRL: `GRPOTrainer` with an environment and `transformers`' ``generate`` (`racing.child_trl`).

Each racer searches its learning rate alike: one race for each of `RATES`, the same in all steps,
ended once it has taken more CPU than that racer's best so far. The best rate runs again on other
questions and another adapter for each of `SEEDS`, and the ratio is of the sums of these. All else
is each library's own default or what `racing` says. The racers take turns, three steps each, so
that they meet the same machine; their seconds are user and system time of all their processes from
the start on, with one torch thread in each.

ART is not among them: without a GPU its loop does not run (`docs/benchmarks.md` says what of it
does).

A racer that has not arrived after `STEPS` steps counts with what it took until then, so that the
ratio is a bound; ``bounds`` in the conditions says which.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import transformers
from langchain_core.utils.function_calling import convert_to_openai_tool
from rich.console import Console

from benchmarks.learning.children import TRL, trl_python
from benchmarks.racing.plan import Course, Mark, Told, best_rate, over
from benchmarks.racing.racer import Racer
from examples.email_search.agent import MAX_MODEL_CALLS, SYSTEM_PROMPT, TOOLS
from examples.email_search.inbox import MailStore, build
from examples.email_search.train import BASE_MODEL, MAX_TOKENS, make_rollout
from langchain_art import ChatART, LocalServer
from langchain_art.rollout.scenarios import draw
from langchain_art_server.merge_adapter import merge

TARGET, STEPS, EVERY = 0.75, 30, 3
GROUPS, SIZE, HELD_OUT = 16, 8, 200
RATES = (3e-3, 1e-2, 1e-3)
SEARCH_SEED, SEEDS = 0, (1, 2)
#: Ours first.
RACERS = ("ours", "trl")
console = Console()


def start(racer: str) -> list[str | Path]:
    """How a racer is started, but for its folder."""
    if racer == RACERS[0]:
        return [sys.executable, "-m", "benchmarks.racing.ours"]
    return [trl_python(), "-m", "benchmarks.racing.child_trl"]


def told(mails: Path, rate: float, seed: int) -> Told:
    """The task of all racers."""
    return Told(
        base=str(BASE_MODEL),
        mails=str(mails),
        scenarios=[draw(range(STEPS * GROUPS), at, seed) for at in range(STEPS * GROUPS)],
        rate=rate,
        seed=seed,
        steps=STEPS,
        every=EVERY,
        groups=GROUPS,
        size=SIZE,
        max_tokens=MAX_TOKENS,
        max_calls=MAX_MODEL_CALLS,
        tools=[convert_to_openai_tool(tool) for tool in TOOLS],
        system=SYSTEM_PROMPT,
    )


async def mean_reward(model: ChatART, mails: MailStore) -> float:
    """Of the demo's agent on the held-out questions, one run each."""
    rollout = make_rollout(model, mails)
    runs = await asyncio.gather(*(rollout(one) for one in mails.scenarios("test")))
    return statistics.fmean(run.reward or 0.0 for run in runs)


def judged(adapter: Path, mails: MailStore) -> float:
    """What the demo's agent comes to with an adapter."""
    with tempfile.TemporaryDirectory(prefix="art-race-") as name:
        whole = Path(name) / "merged"
        merge(str(BASE_MODEL), adapter, whole)
        with LocalServer(whole, data_dir=Path(name) / "server") as server:
            model = ChatART(model=whole.name, base_url=server.base_url, max_tokens=MAX_TOKENS)
            return asyncio.run(mean_reward(model, mails))


def race(rates: Mapping[str, float], seed: int, most: Mapping[str, float]) -> list[Course]:
    """A race of each racer at its rate, in turns; one that has taken more than `most` gives up."""
    courses: dict[str, Course] = {}
    racers: dict[str, Racer] = {}
    marks: dict[str, list[Mark]] = {name: [] for name in rates}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="art-race-")))
        path = build(folder / "mails.sqlite3", n_train=STEPS * GROUPS, n_test=HELD_OUT, seed=seed)
        mails = MailStore(path)
        stack.callback(mails.close)
        while left := [name for name in rates if name not in courses]:
            for name in left:
                if name in racers:
                    racers[name].go()
                else:
                    task = told(path, rates[name], seed)
                    racers[name] = stack.enter_context(Racer(start(name), folder / name, task))
                seen = racers[name].hear()
                mark = Mark(seen.step, seen.cpu, judged(seen.adapter, mails))
                marks[name].append(mark)
                console.print(
                    f"seed {seed}, rate {rates[name]:g}, {name}: step {mark.step}, "
                    f"{mark.cpu:.0f} CPU s, held out {mark.reward:.3f}"
                )
                if mark.reward >= TARGET or mark.step >= STEPS or mark.cpu > most.get(name, inf):
                    arrived = mark.reward >= TARGET
                    courses[name] = Course(name, rates[name], seed, marks[name], arrived)
    return [courses[name] for name in rates]


def search() -> list[Course]:
    """A race for each learning rate; a racer's own best so far ends its others."""
    courses: list[Course] = []
    for rate in RATES:
        most: dict[str, float] = {}
        for one in courses:
            if one.reached:
                most[one.racer] = min(one.cpu, most.get(one.racer, inf))
        courses += race(dict.fromkeys(RACERS, rate), SEARCH_SEED, most)
    return courses


def run() -> tuple[dict[str, float], dict[str, Any]]:
    transformers.utils.logging.disable_progress_bar()
    searched = search()
    rates = {name: best_rate(one for one in searched if one.racer == name) for name in RACERS}
    raced = [one for seed in SEEDS for one in race(rates, seed, {})]
    by_name = {name: [one for one in raced if one.racer == name] for name in RACERS}
    figures: dict[str, float] = {}
    bounds: dict[str, str] = {}
    for name in RACERS[1:]:
        ratio = over(by_name[name], by_name[RACERS[0]])
        figures[f"{name}_over_ours"], bounds[f"{name}_over_ours"] = ratio.value, ratio.bound
    for name, courses in by_name.items():
        figures[f"{name}_cpu_seconds"] = statistics.fmean(one.cpu for one in courses)
        figures[f"{name}_steps"] = statistics.fmean(one.marks[-1].step for one in courses)
        figures[f"{name}_cpu_seconds_a_step"] = statistics.fmean(one.per_step for one in courses)
        figures[f"{name}_rate"] = rates[name]
    more: dict[str, Any] = {
        "bounds": bounds,
        "search": [asdict(one) for one in searched],
        "races": [asdict(one) for one in raced],
        "target": TARGET,
        "most_steps": STEPS,
        "steps_between_marks": EVERY,
        "held_out": HELD_OUT,
        "groups_per_step": GROUPS,
        "group_size": SIZE,
        "trl": TRL,
        "load_at_end": round(os.getloadavg()[0], 2),
    }
    return figures, more
