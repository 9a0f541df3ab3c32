"""CPU seconds until a pretrained model routes seven of ten held-out messages: ours against TRL.

The task is `examples.triage` on SmolLM2-135M-Instruct. Each racer begins with a new LoRA adapter
(rank 16, all linear layers), reads the same system prompt and the same messages in the same order,
four a step and eight runs of each, and gets 1 for the right department. After every step it waits
while `racing.judge` says what its adapter comes to on the held-out messages; that is not counted.
A racer has arrived with its first adapter whose mean is `TARGET`.

- ours: `Trainer`, `ChatART` and a `LocalServer` with all defaults, so that the rate is chosen and
  follows the steps, and replies are held to the agent's schema (`racing.ours`);
- TRL: `GRPOTrainer` with its defaults but for the constant rate (`racing.child_trl`). On a CPU it
  draws with `transformers`' ``generate``, which knows no schema, and none of 64 free replies of the
  base is JSON with a department, so that nothing would be learned. Its replies are held to the four
  right ones by a function that ``generate`` takes, which the race passes to it from outside.

TRL's rate is searched by short races, one for each of `RATES`, on messages of another seed. Both
take turns, a step each, so that they meet the same machine. Seconds are user and system
time of all of a racer's processes from the start on, with one torch thread in each. TRL gives up
once it has taken `MOST` times what ours took until the target: then the ratio is a bound, and
``bounds`` in the conditions says so.

``python -m benchmarks.race --seed 0`` runs one seed; ``--quick`` two steps of it, as a check.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console

from benchmarks.learning.children import TRL, trl_python
from benchmarks.racing.judge import Judge
from benchmarks.racing.plan import Course, Mark, Told, best_rate, over
from benchmarks.racing.racer import Racer
from examples.triage.agent import ROUTER_PROMPT
from examples.triage.tickets import DEPARTMENTS, tickets
from examples.triage.train import DEMO, MESSAGES
from langchain_art.rollout.scenarios import draw
from langchain_art_server.gguf_base import unpacked

TARGET, MOST = 0.7, 3.5
#: An epoch of the messages.
STEPS = MESSAGES // DEMO.groups_per_step
SEARCH_SEED, SEARCH_STEPS, RATES = 3, 12, (3e-4, 1e-3, 1e-4)
SEEDS = (0, 1, 2)
#: Ours first.
RACERS = ("ours", "trl")
REPLIES = [json.dumps({"department": one}) for one in DEPARTMENTS]
console = Console()


def start(racer: str) -> list[str | Path]:
    """How a racer is started, but for its folder."""
    if racer == RACERS[0]:
        return [sys.executable, "-m", "benchmarks.racing.ours"]
    return [trl_python(), "-m", "benchmarks.racing.child_trl"]


def told(base: Path, rate: float, seed: int, steps: int) -> Told:
    """The task of all racers; sizes are the defaults of `Trainer`."""
    return Told(
        base=str(base),
        messages=MESSAGES,
        order=[draw(range(MESSAGES), at, seed) for at in range(steps * DEMO.groups_per_step)],
        rate=rate,
        seed=seed,
        steps=steps,
        groups=DEMO.groups_per_step,
        size=DEMO.group_size,
        max_tokens=DEMO.max_tokens,
        system=ROUTER_PROMPT,
        replies=REPLIES,
    )


def race(rates: Mapping[str, float], seed: int, steps: int, held_out: int) -> list[Course]:
    """A race of each racer at its rate, in turns; once ours has arrived, the other may give up."""
    base = unpacked("smollm2-135m", Path(), "cpu")
    judge = Judge(base, REPLIES, ROUTER_PROMPT, tickets("test", held_out, seed))
    courses: dict[str, Course] = {}
    racers: dict[str, Racer] = {}
    marks: dict[str, list[Mark]] = {name: [] for name in rates}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="art-race-")))
        while left := [name for name in rates if name not in courses]:
            for name in left:
                if name in racers:
                    racers[name].go()
                else:
                    task = told(base, rates[name], seed, steps)
                    racers[name] = stack.enter_context(Racer(start(name), folder / name, task))
                seen = racers[name].hear()
                reward = judge.mean(seen.adapter)
                mark = Mark(seen.step, seen.cpu, seen.own, seen.reward, reward)
                marks[name].append(mark)
                console.print(
                    f"seed {seed}, rate {rates[name]:g}, {name}: step {mark.step}, "
                    f"{mark.cpu:.0f} CPU s ({mark.own:.0f} its own), runs {mark.trained}, "
                    f"held out {mark.reward:.3f}",
                    soft_wrap=True,
                )
                ours = courses.get(RACERS[0])
                most = MOST * ours.cpu if ours and ours.reached else inf
                if mark.reward >= TARGET or mark.step >= steps or mark.cpu > most:
                    arrived = mark.reward >= TARGET
                    courses[name] = Course(name, rates[name], seed, marks[name], arrived)
    return [courses[name] for name in rates]


def run(
    seeds: Sequence[int] = SEEDS, quick: bool = False
) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures, and all marks."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    steps, search_steps, held_out = (2, 1, 8) if quick else (STEPS, SEARCH_STEPS, DEMO.held_out)
    searched = [
        race({RACERS[1]: rate}, SEARCH_SEED, search_steps, held_out)[0]
        for rate in (RATES[:1] if quick else RATES)
    ]
    rate = best_rate(searched)
    raced = [
        one for seed in seeds for one in race(dict.fromkeys(RACERS, rate), seed, steps, held_out)
    ]
    by_name = {name: [one for one in raced if one.racer == name] for name in RACERS}
    figures: dict[str, float] = {"trl_rate": rate}
    ratio = over(by_name[RACERS[1]], by_name[RACERS[0]])
    figures["trl_over_ours"] = ratio.value
    for name, courses in by_name.items():
        figures[f"{name}_cpu_seconds"] = statistics.fmean(one.cpu for one in courses)
        figures[f"{name}_own_cpu_seconds"] = statistics.fmean(one.marks[-1].own for one in courses)
        figures[f"{name}_steps"] = statistics.fmean(one.marks[-1].step for one in courses)
        figures[f"{name}_cpu_seconds_a_step"] = statistics.fmean(one.per_step for one in courses)
    more: dict[str, Any] = {
        "bounds": {"trl_over_ours": ratio.bound},
        "search": [asdict(one) for one in searched],
        "races": [asdict(one) for one in raced],
        "target": TARGET,
        "most_steps": steps,
        "held_out": held_out,
        "groups_per_step": DEMO.groups_per_step,
        "group_size": DEMO.group_size,
        "trl": TRL,
        "load_at_end": round(os.getloadavg()[0], 2),
    }
    return figures, more


def main(seed: Annotated[list[int] | None, typer.Option()] = None, quick: bool = False) -> None:
    """Race on some seeds, and print the figures and the marks."""
    figures, more = run(seed or SEEDS, quick)
    print(json.dumps({"figures": figures, "conditions": more}, indent=2))


if __name__ == "__main__":
    typer.run(main)
