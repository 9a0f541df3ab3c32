"""The demo of an example: from the server's start to the plot of the rewards.

An example says in a `Demo` what is trained; `command` makes its command line of it. The demo starts
a server on this machine (or uses ``--base-url``), trains, evaluates on held-out scenarios before
and after, and writes ``summary.json``, ``reward.png`` and ``transcripts.md``.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import typer
from langchain_core.messages import BaseMessage
from rich.console import Console

from examples.support.control import shuffled
from examples.support.held_out import measures, shown, stored_runs, write_transcripts
from langchain_art import (
    ArtClient,
    ArtError,
    ChatART,
    EvalResult,
    FitResult,
    LocalServer,
    LRSchedule,
    Run,
    TrainConfig,
    Trainer,
)
from langchain_art.packages import made_once

#: Below a demo's folder: what a fit leaves there, and its server.
FILES = ("server", "fit.json", "history.jsonl", "pending.json", "earlier")


@dataclass(frozen=True)
class Demo:
    """What is trained, and with how much.

    Attributes:
        name: As ``langchain-art demo NAME`` has it, with hyphens.
        title: Of the plot.
        base_model: Folder of the base model, or a name that ``langchain-art serve`` takes.
        policies: Names of the policies that learn.
        build: Makes the parts of a fit.
        steps: Optimizer steps.
        groups_per_step: Scenarios in a step.
        group_size: Runs of each.
        held_out: Scenarios of the evaluations.
        learning_rate: Of the small model; a large one takes less (``--learning-rate``). None: that
            which `TrainConfig` chooses.
        max_tokens: Of one reply of the small model (``--max-tokens``).
        files: What `build` leaves in the folder and ``--fresh`` has to erase.
        folder: Below ``out/``. "": ``demo-`` and the name.
        serve_options: More options of ``langchain-art serve`` for the base model.
        solved: A scenario with the reply that is wanted, as messages. None: nobody knows it.
    """

    name: str
    title: str
    base_model: Path | str
    policies: tuple[str, ...]
    build: Callable[[Setup], Fit]
    steps: int = 30
    groups_per_step: int = 16
    group_size: int = 8
    held_out: int = 200
    learning_rate: float | None = 3e-3
    max_tokens: int = 48
    files: tuple[str, ...] = ()
    folder: str = ""
    serve_options: tuple[str, ...] = ()
    solved: Callable[[Any], Sequence[BaseMessage]] | None = None


#: A `Demo` on a pretrained model, which pip fetches.
pretrained_demo = partial(
    Demo, base_model="smollm2-135m", steps=40, groups_per_step=4, held_out=96, learning_rate=None
)


def base_model_of(folder: Path | str) -> Path | str:
    """A base model as `Demo` names it; if its folder is not there, its example's script makes one.

    A wheel has no weights. They are made once, below ``out/base_models``.
    """
    if isinstance(folder, str) or folder.exists():
        return folder
    example = folder.parent
    inner = example.relative_to(Path(__file__).parents[1]).parts
    script = ".".join((__name__.removesuffix(".support.demo"), *inner, "build_base_model"))

    def build(out: Path) -> None:
        Console().print(f"Building the base model with {script}, once. It takes some minutes.")
        subprocess.run([sys.executable, "-m", script, "--out", out], check=True)

    return made_once(Path("out", "base_models", example.name).resolve(), build)


@dataclass(frozen=True)
class Setup:
    """What a demo's `build` is told.

    Attributes:
        demo: The demo, with its sizes.
        base_url: Of the server.
        out: Folder for what `build` writes, and for what a resumed fit needs.
        steps: Optimizer steps.
        seed: Of the scenarios and of their order.
        evaluator: Scores training runs. None: they bring their rewards.
        temperature: Of the chat models. None: 1.
        few_shot: Solved training scenarios that stand in each prompt.
    """

    demo: Demo
    base_url: str
    out: Path
    steps: int
    seed: int = 0
    evaluator: Any = None
    temperature: float | None = None
    few_shot: int = 0

    def shots(self, train: Sequence[Any]) -> list[BaseMessage]:
        """The first `few_shot` of the training scenarios, solved."""
        if not (solved := self.demo.solved):
            return []
        return [message for one in train[: self.few_shot] for message in solved(one)]

    @property
    def train_scenarios(self) -> int:
        """Number of training scenarios that lets none be seen twice."""
        return self.demo.groups_per_step * self.steps

    def chat(self, policy: str | None = None) -> ChatART:
        """The chat model of a policy, which is to be one of the demo's. None: of the first."""
        return ChatART(
            model=policy or self.demo.policies[0],
            base_url=self.base_url,
            max_tokens=self.demo.max_tokens,
            temperature=self.temperature,
        )

    def config(self, **options: Any) -> TrainConfig:
        """The demo's settings of an optimizer step; `options` are of `TrainConfig`.

        A pretrained model has the defaults, but for the learning rate.
        """
        if isinstance(self.demo.base_model, str):
            return TrainConfig(learning_rate=self.demo.learning_rate, **options)
        settings: dict[str, Any] = {
            "learning_rate": self.demo.learning_rate,
            "schedule": LRSchedule(warmup_steps=5, decay_steps=max(self.steps, 6)),
            "advantage": "standardized",
            # The gallery was measured with these two.
            "momentum": 0.9,
            "max_kl": None,
            "tokens_per_microbatch": 4096,
        }
        return TrainConfig(**(settings | options))

    def trainer(self, models: Sequence[ChatART], **options: Any) -> Trainer:
        """The trainer of `models`, with the demo's sizes and settings.

        Args:
            models: Chat model of each policy.
            **options: Of `Trainer`, in place of these settings.
        """
        demo = self.demo
        settings: dict[str, Any] = {
            "evaluator": self.evaluator,
            "group_size": demo.group_size,
            "groups_per_step": demo.groups_per_step,
            "concurrency": demo.groups_per_step * demo.group_size,
            "config": self.config(),
            "out_dir": self.out,
            "seed": self.seed,
        }
        return Trainer(models, **(settings | options))


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Fit:
    """What `Trainer.fit` is called with; a scenario has an `id`, which its run bears.

    Figures beside the reward, such as whether a game was won, are `scores` of the runs:
    ``run.scores["won"] = 1.0``. The demo reports the mean of each over the held-out runs.

    Attributes:
        trainer: Made by `Setup.trainer`.
        rollout: Runs the graph on a scenario, and gives the run its reward.
        train: Scenarios to learn from.
        held_out: Scenarios of the evaluations.
        close: Called at the end.
    """

    trainer: Trainer
    rollout: Callable[[Any], Awaitable[Run]]
    train: Sequence[Any]
    held_out: Sequence[Any]
    close: Callable[[], None] = field(default=_nothing)


def summary(result: FitResult, seconds: float, seed: int, control: bool) -> dict[str, Any]:
    """What ``summary.json`` holds; `ci95` is the half-width of the 95 % interval."""

    def figures(held_out: EvalResult | None) -> dict[str, Any] | None:
        return held_out and {"mean": held_out.mean, "ci95": held_out.ci95, "n": held_out.n}

    spent: dict[str, float] = {}
    for record in result.history:
        for phase, value in record.seconds.items():
            spent[phase] = round(spent.get(phase, 0.0) + value, 2)
    return {
        "before": figures(result.before),
        "after": figures(result.after),
        "seconds": round(seconds, 1),
        "steps": len(result.history),
        "adapter": " + ".join(result.adapters),
        "seed": seed,
        "control": control,
        "seconds_by_phase": spent,
        "excluded": result.excluded,
    }


def folder_of(demo: Demo, seed: int, *words: str) -> Path:
    """Where a demo with these settings goes: each has a folder, so that none is mixed up."""
    seeds = [f"seed{seed}"] if seed else []
    return Path("out", "-".join([demo.folder or f"demo-{demo.name}", *seeds, *words]))


def control_words(control: bool) -> list[str]:
    """What a control's folder is called."""
    return ["control"] if control else []


async def _fit(fit: Fit, steps: int, fresh: bool) -> FitResult:
    return await fit.trainer.fit(
        fit.rollout,
        fit.train,
        steps=steps,
        eval_scenarios=fit.held_out,
        eval_every=max(1, -(-steps // 3)),
        fresh=fresh,
    )


def run(
    demo: Demo,
    *,
    out: Path,
    steps: int,
    seed: int = 0,
    control: bool = False,
    base_url: str | None = None,
    fresh: bool = False,
    evaluator: Callable[[], Any] | None = None,
    note: str = "",
    more: Callable[[FitResult, Any, ArtClient], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Train, evaluate, write the files and print the result.

    Args:
        demo: What is trained.
        out: Folder of the demo; made if missing.
        steps: Optimizer steps.
        seed: Of the scenarios and of their order.
        control: Train on the rewards of each group dealt out at random within it.
        base_url: Of a server that runs. None: one is started here, and stopped at the end.
        fresh: Erase what a former demo left in `out`, and begin anew.
        evaluator: Makes what scores training runs, which then have no reward of their own.
        note: Added to the plot's title.
        more: Of the result, the evaluator and a client of the server: what else ``summary.json`` is
            to say.

    Returns:
        What ``summary.json`` holds.

    Raises:
        typer.Exit: With status 1, after the message of an `ArtError` was printed.
    """
    console = Console()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if fresh:
        for old in (*FILES, *demo.files):
            path = out / old
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    base_model = demo.base_model if base_url else base_model_of(demo.base_model)
    local = LocalServer(
        base_model,
        policies=demo.policies,
        data_dir=out / "server",
        options=demo.serve_options,
    )
    try:
        scores = evaluator() if evaluator else None
        if control:
            scores = shuffled(seed, scores)
        with local if base_url is None else nullcontext():
            url = base_url or local.base_url
            console.print(f"Server: {url}   data: {out / 'server'}   log: {local.log}")
            started = time.monotonic() - begun
            fit = demo.build(Setup(demo, url, out, steps, seed, scores))
            try:
                result = asyncio.run(_fit(fit, steps, fresh))
            finally:
                fit.close()
            seconds = started + result.seconds  # those of a demo that was stopped included
            with ArtClient(url) as client:
                runs = stored_runs(client, fit.held_out, [result.before, result.after])
                added = more(result, scores, client) if more else {}
    except ArtError as error:
        console.print(f"[bold red]{type(error).__name__}:[/]", end=" ")
        console.print(str(error), markup=False, highlight=False)
        if "holds another fit" in str(error):
            console.print(f"Of the demo: --out is another folder, --fresh erases {out}.")
        raise typer.Exit(1) from error
    note += " (control: shuffled rewards)" if control else ""
    plot = out / "reward.png"
    result.plot(plot, f"{demo.title}, seed {seed}{note}")
    figures = summary(result, seconds, seed, control)
    figures["measures"] = measures(*runs)
    figures |= added
    (out / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    page = write_transcripts(out / "transcripts.md", demo.title, *runs)
    console.print(f"Held-out reward {result.before} → {result.after} in {seconds:.0f} s.")
    for name, found in figures["measures"].items():
        console.print(f"Held-out {name} {shown(found['before'])} → {shown(found['after'])}")
    console.print(f"Plot: {plot}\nTranscripts: {page}\nSummary: {out / 'summary.json'}")
    for policy, version in result.versions.items():
        folder = out / "server" / "adapters" / policy / str(version)
        console.print(f"Adapter {policy}@{version}" + ("" if base_url else f": {folder}"))
    return figures
