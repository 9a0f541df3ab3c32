"""The command lines of an example: its demo, and the evaluation of a version."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from examples.support.demo import Demo, Setup, control_words, folder_of, run
from examples.support.held_out import score_figures, shown
from langchain_art import Run

Seed = Annotated[int, typer.Option(help="Of the scenarios and of their order")]
Steps = Annotated[int, typer.Option(help="Optimizer steps, one version each")]
Control = Annotated[bool, typer.Option(help="Shuffle the rewards within each group")]
Out = Annotated[
    Path | None, typer.Option(help="Where results go. Default: below out/, by the settings")
]
BaseUrl = Annotated[str | None, typer.Option(help="A server that runs; else start one")]
Fresh = Annotated[
    bool, typer.Option(help="Erase what a former demo left in the directory, and begin anew")
]
LearningRate = Annotated[float, typer.Option(help="A large model takes less: 1e-5 to 1e-4")]
MaxTokens = Annotated[int, typer.Option(help="Of one reply; a large model may take more")]


def train_command(demo: Demo, help: str) -> Callable[..., None]:
    """The command line of a demo, for `typer.run`; `help` is what it says of itself."""

    def main(
        seed: Seed = 0,
        steps: Steps = demo.steps,
        control: Control = False,
        out: Out = None,
        base_url: BaseUrl = None,
        fresh: Fresh = False,
        learning_rate: LearningRate = demo.learning_rate,
        max_tokens: MaxTokens = demo.max_tokens,
    ) -> None:
        run(
            replace(demo, learning_rate=learning_rate, max_tokens=max_tokens),
            out=out or folder_of(demo, seed, *control_words(control)),
            steps=steps,
            seed=seed,
            control=control,
            base_url=base_url,
            fresh=fresh,
        )

    main.__doc__ = (
        f"{help}\n\nStopped (Ctrl-C) and run again, it goes on; finished and run again, it shows "
        "its result."
    )
    return main


def evaluate_command(demo: Demo, help: str) -> Callable[..., None]:
    """The command line of the evaluation of a version, for `typer.run`."""

    def main(
        models: Annotated[
            list[str] | None,
            typer.Argument(help="Policies, versions (NAME@7) or the base"),
        ] = None,
        base_url: Annotated[
            str, typer.Option(help="Where the server is")
        ] = "http://localhost:8000/v1",
        seed: Annotated[int, typer.Option(help="Of the scenarios")] = 1000,
        n: Annotated[int, typer.Option(help="Held-out scenarios")] = demo.held_out,
        greedy: Annotated[bool, typer.Option(help="Temperature 0 instead of 1")] = False,
        max_tokens: MaxTokens = demo.max_tokens,
    ) -> None:
        names = tuple(models or demo.policies)
        if len(names) != len(demo.policies):
            raise typer.BadParameter(f"got {names}, expected one for each of {demo.policies}")
        chosen = replace(demo, policies=names, held_out=n, max_tokens=max_tokens)
        with tempfile.TemporaryDirectory() as folder:
            temperature = 0.0 if greedy else None
            setup = Setup(chosen, base_url, Path(folder), 1, seed, temperature=temperature)
            fit = chosen.build(setup)
            done: list[Run] = []

            async def rollout(scenario: object) -> Run:
                done.append(await fit.rollout(scenario))
                return done[-1]

            try:
                result = fit.trainer.evaluate_sync(rollout, fit.held_out)
            finally:
                fit.close()
        print(f"{result.version}: {result}")
        for name, found in score_figures(done).items():
            print(f"{name}: {shown(found)}")

    main.__doc__ = help
    return main
