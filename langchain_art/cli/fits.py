"""`langchain-art fits` and `curve`: experiments."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table
from typer.core import TyperGroup

from langchain_art.cli.options import AsJson, BaseUrl, client_of, console, say

if TYPE_CHECKING:
    from langchain_art.training.fits import Fit

Root = Annotated[Path, typer.Option(help="The folder below which fits are looked for.")]


class _ListsByDefault(TyperGroup):
    """`fits` with names of fits, or without any, is `fits list`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, "--help"}:
            args.insert(0, "list")
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ListsByDefault, help="List and compare fits, or find where two with one seed differ."
)


@app.command("list")
def fits(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Folders of fits. None: all.")
    ] = None,
    root: Root = Path("out"),
    as_json: AsJson = False,
) -> None:
    """List fits and compare them: how far they are, what they gained, which version to use.

    With names, what differs between the first of them and the others is listed too.

    \b
    Examples:
      langchain-art fits
      langchain-art fits lr-1 lr-3
    """
    from langchain_art.training.fits import chosen_fits

    found = chosen_fits(root, names or [])
    if as_json:
        typer.echo(json.dumps([_json(fit) for fit in found], indent=2, allow_nan=False))
        return
    console.print(_table(found))
    for other in found[1:] if names else []:
        differences = found[0].state.used.differences(other.state.used)
        words = "; ".join(differences) or "no setting; fits diff finds what is not equal"
        say(f"{found[0].name} -> {other.name}: {words}")


@app.command()
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="The folder of a fit.")],
    other: Annotated[str, typer.Argument(metavar="B", help="That of another one.")],
    root: Root = Path("out"),
    base_url: BaseUrl = None,
    other_url: Annotated[str | None, typer.Option(help="B's server, if it is not A's.")] = None,
) -> None:
    """Find the first call, token, reward, metric or weight that two fits with one seed differ in.

    The exit code is 0 if they are equal, and 1 if they are not. A's server and B's are the same,
    unless --other-url says otherwise.

    \b
    Examples:
      langchain-art fits diff before after
      langchain-art fits diff here there --other-url http://trainer.example:8000/v1
    """
    from langchain_art.training.fits import chosen_fits, compare_fits

    first, second = chosen_fits(root, [one, other])
    settings = first.state.used.differences(second.state.used)
    with client_of(base_url) as client, client_of(other_url or base_url) as others:
        found = compare_fits(first, second, client, others)
    if settings:
        typer.echo(f"settings: {'; '.join(settings)}")
    typer.echo(str(found))
    if found.first is not None:
        raise typer.Exit(1)


def curve(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Folders of fits. None: all.")
    ] = None,
    root: Root = Path("out"),
    png: Annotated[Path | None, typer.Option(help="Draw into this image, with matplotlib.")] = None,
) -> None:
    """Draw reward by step, of one fit or of several for comparison.

    \b
    Examples:
      langchain-art curve my-agent
      langchain-art curve lr-1 lr-3 --png out/rates.png
    """
    from langchain_art.training.fits import chosen_fits
    from langchain_art.training.report import Curve, figure_of, saved, text_plot

    curves = [Curve(fit.name, fit.steps, fit.evals) for fit in chosen_fits(root, names or [])]
    if png is None:
        typer.echo(text_plot(curves, min(console.width, 100)))
    else:
        path = saved(figure_of(curves, "Reward during training"), png)
        console.print(f"{path}", highlight=False)


def _table(found: list[Fit]) -> Table:
    names = ("state", "steps", "reward", "first", "best", "last", "when")
    columns = [Column(name, no_wrap=True) for name in names]
    table = Table(
        Column("fit", overflow="fold"), *columns, Column("use", overflow="fold"), box=None
    )
    for fit in found:
        figures = [f"{mean:.3f}" for _, mean in fit.rewards]
        best = "-" if fit.best is None else f"{fit.best[1]:.3f}"
        table.add_row(
            escape(fit.name),
            fit.words,
            f"{fit.done}/{fit.state.steps}",
            "held out" if fit.held_out else "training",
            *([figures[0], best, figures[-1]] if figures else ["-", "-", "-"]),
            datetime.fromtimestamp(fit.at).astimezone().strftime("%m-%d %H:%M"),
            escape(fit.use),
        )
    return table


def _json(fit: Fit) -> dict[str, Any]:
    rewards = fit.rewards
    return {
        "name": fit.name,
        "state": fit.words,
        "steps": {"done": fit.done, "asked": fit.state.steps},
        "reward": {
            "of": "held out" if fit.held_out else "training",
            "first": rewards[0][1] if rewards else None,
            "best": None if fit.best is None else fit.best[1],
            "last": rewards[-1][1] if rewards else None,
        },
        "at": fit.at,
        "use": fit.use,
        "identity": fit.state.used.model_dump(mode="json"),
    }
