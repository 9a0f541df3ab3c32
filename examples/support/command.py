"""The command lines of an example: its demo, and the evaluation of a version."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

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
LearningRate = Annotated[float | None, typer.Option(help="A large model takes less: 1e-5 to 1e-4")]
MaxTokens = Annotated[int, typer.Option(help="Of one reply; a large model may take more")]


@dataclass(frozen=True)
class Given:
    """What the options that every demo has were given as.

    Attributes:
        demo: With the learning rate and the most tokens of a reply that were asked for.
        seed: Of the scenarios and of their order.
        control: Shuffle the rewards within each group.
        base_url: A server that runs. None: one is started.
        out: Where results go. None: see `folder`.
    """

    demo: Demo
    seed: int
    control: bool
    base_url: str | None
    out: Path | None

    def folder(self, *words: str) -> Path:
        """Where results go; `words` tell other settings of an example's own options apart."""
        words = (*control_words(self.control), *words)
        return self.out or folder_of(self.demo, self.seed, *words)


def train_command(
    demo: Demo, help: str, own: Callable[..., Mapping[str, Any]] | None = None
) -> Callable[..., None]:
    """The command line of a demo, for `typer.run`.

    Args:
        demo: What is trained.
        help: What the command says of itself.
        own: Options of this example alone, with defaults, after a first parameter that takes what
            was `Given`. Returns arguments of `run` in place of those of the other options.
    """

    def main(
        seed: Seed = 0,
        steps: Steps = demo.steps,
        control: Control = False,
        out: Out = None,
        base_url: BaseUrl = None,
        fresh: Fresh = False,
        learning_rate: LearningRate = demo.learning_rate,
        max_tokens: MaxTokens = demo.max_tokens,
        **own_options: Any,
    ) -> None:
        sized = replace(demo, learning_rate=learning_rate, max_tokens=max_tokens)
        given = Given(sized, seed, control, base_url, out)
        arguments: dict[str, Any] = {
            "demo": sized,
            "out": given.folder(),
            "steps": steps,
            "seed": seed,
            "control": control,
            "base_url": base_url,
            "fresh": fresh,
        }
        run(**(arguments | dict(own(given, **own_options) if own else {})))

    parameters = list(inspect.signature(main).parameters.values())[:-1]
    hints = get_type_hints(main, include_extras=True)
    if own is not None:
        parameters += list(inspect.signature(own).parameters.values())[1:]
        hints |= get_type_hints(own, include_extras=True)
    # What typer reads: without `own_options`, with the example's own.
    parameters = [one.replace(annotation=hints[one.name]) for one in parameters]
    main.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    main.__annotations__ = {one.name: one.annotation for one in parameters}
    main.__doc__ = (
        f"{help}\n\nStopped (Ctrl-C) and run again, it goes on; finished and run again, it shows "
        "its result."
    )
    return main


def level_options(
    build: Callable[..., Any], levels: Iterable[int], help: str
) -> Callable[..., dict[str, Any]]:
    """The option ``--level``, for `train_command`.

    Args:
        build: Makes the parts of a fit, of a `Setup` and a ``level``.
        levels: Those that there are, from 1, the easiest.
        help: What the option says of itself.
    """

    def options(given: Given, level: int = 1) -> dict[str, Any]:
        words = [f"level{level}"] if level > 1 else []
        demo = replace(given.demo, build=partial(build, level=level))
        return {"demo": demo, "out": given.folder(*words)}

    options.__annotations__["level"] = Annotated[
        int, typer.Option(min=1, max=max(levels), help=help)
    ]
    return options


def evaluate_command(demo: Demo) -> Callable[..., None]:
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
        few_shot: Annotated[
            int, typer.Option(min=0, help="Solved training scenarios in each prompt")
        ] = 0,
        max_tokens: MaxTokens = demo.max_tokens,
    ) -> None:
        names = tuple(models or demo.policies)
        if len(names) != len(demo.policies):
            raise typer.BadParameter(f"got {names}, expected one for each of {demo.policies}")
        if few_shot and demo.solved is None:
            raise typer.BadParameter(f"{demo.name} has no solved scenarios to show (--few-shot)")
        chosen = replace(demo, policies=names, held_out=n, max_tokens=max_tokens)
        with tempfile.TemporaryDirectory() as folder:
            temperature = 0.0 if greedy else None
            setup = Setup(chosen, base_url, Path(folder), 1, seed, None, temperature, few_shot)
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

    main.__doc__ = f"{demo.title}: mean reward of a version on held-out scenarios."
    return main
