"""`langchain-art review`: what people say of runs, brought back and made use of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from langchain_art.cli.options import AsJson, BaseUrl, client_of, console, say
from langchain_art.cli.review_train import ScoreName, named_number, train
from langchain_art.errors import ConfigError
from langchain_art.export.ids import HUMAN_REWARD
from langchain_art.wire.reviews import FATES, Pick

if TYPE_CHECKING:
    from langchain_art.review.pull import Pulled

app = typer.Typer(
    no_args_is_help=True,
    help="Let people review runs in Langfuse, and bring what they say to the server."
    "\n\n\b\nEnvironment:\n"
    "  LANGFUSE_BASE_URL, LANGFUSE_PUBLIC_KEY, LANGFUSE_SECRET_KEY",
)
Notes = Annotated[Path, typer.Option(help="The folder in which pulls note how far they read.")]
app.command()(train)


@app.command("pull")
def pull_reviews(
    name: ScoreName = HUMAN_REWARD,
    source: Annotated[
        Literal["annotation", "api"],
        typer.Option(help="Given by people in the interface, or sent by an application."),
    ] = "annotation",
    value: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL=NUMBER", help="What a label is worth; may be repeated."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Read all scores, and find those that were deleted.")
    ] = False,
    root: Notes = Path("out"),
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Read the scores of Langfuse, and keep them on the server as rewards and corrections.

    The score --name becomes the reward of its run or call; people's other scores are kept beside
    it; a corrected output becomes the reply that the call should have given. The same score again
    is a revision of the one before.

    \b
    Examples:
      langchain-art review pull
      langchain-art review pull --name verdict --value good=1 --value bad=0
      langchain-art review pull --source api --name user_feedback
    """
    from langchain_art.review.pull import pull
    from langchain_art.review.scores import Reading

    worth = dict(named_number("--value", one, "good=1") for one in value or [])
    reading = Reading(name, source.upper(), worth)
    with client_of(base_url) as client:
        found = pull(client, reading, root=root, everything=everything)
    if as_json:
        typer.echo(json.dumps(_json(found), indent=2))
        return
    for line in _lines(found):
        say(line)


@app.command()
def push(
    pick: Annotated[
        Pick | None, typer.Option(help="Which runs come first; the others are not queued.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="The most that are queued.")] = 50,
    policy: Annotated[
        str | None, typer.Option(help="Only runs with a call of this policy.")
    ] = None,
    queue: Annotated[str, typer.Option(help="The annotation queue's name.")] = "langchain-art",
    name: ScoreName = HUMAN_REWARD,
    spool: Annotated[
        Path | None, typer.Option(help="A folder of runs that were not sent, or refused.")
    ] = None,
    to: Annotated[
        Literal["langfuse", "otlp"],
        typer.Option(help="Of --spool: Langfuse, or OTEL_EXPORTER_OTLP_ENDPOINT."),
    ] = "langfuse",
    base_url: BaseUrl = None,
) -> None:
    """Put runs into an annotation queue of Langfuse, or send those that an export could not send.

    disagreement: judges' scores of the run differ most. lowest: the lowest reward. uncertain: the
    rewards of its scenario differ most. A run that was reviewed or queued is not queued again; one
    whose reviewers disagree comes first in another --queue, for a third.

    \b
    Examples:
      langchain-art review push --pick lowest --n 20
      langchain-art review push --spool out/email-agent/spool
    """
    from langchain_art.export.exporter import push_spool
    from langchain_art.review.queue import REASONS, queue_runs

    if spool is not None and pick is None:
        sent = push_spool(spool, to)
        say(str(sent))
        if sent.left or sent.refused:
            raise typer.Exit(1)
        return
    if pick is None or spool is not None:
        raise ConfigError(
            f"got --pick {pick} and --spool {spool}, expected one of them: --pick is disagreement, "
            "lowest, random or uncertain"
        )
    with client_of(base_url) as client:
        found = queue_runs(client, pick, n, policy=policy, name=name, queue=queue)
    say(f"{len(found.queued)} runs are queued in {found.queue!r}, by {pick}")
    for fate, count in found.foreseen.most_common():
        say(f"  {count} to review: rewards {FATES[fate]}")
    for reason, count in found.left_out.most_common():
        say(f"  not queued: {count} {REASONS[reason]}")


@app.command()
def report(
    policy: Annotated[
        str | None, typer.Argument(help="Only runs with a call of this policy.")
    ] = None,
    name: ScoreName = HUMAN_REWARD,
    min_agreement: Annotated[
        float, typer.Option(max=1, help="Reviewers who agree no more than this abstain.")
    ] = 0.0,
    base_url: BaseUrl = None,
) -> None:
    """Show how far reviewers agree, and how far judges can be trusted by people's verdicts.

    \b
    Example:
      langchain-art review report email-agent
    """
    from langchain_art.evaluators.calibration import agreement_table
    from langchain_art.review.report import review_report, trust

    with client_of(base_url) as client:
        found = review_report(client, policy, name=name, min_agreement=min_agreement)
        if policy is not None and not found.reviews:
            client.policy(policy)  # raises NotFound of a misspelled name
    said = found.verdicts
    several = sum(one.reviewers > 1 for one in said.all)
    alpha = "undefined" if said.alpha is None else f"{said.alpha:.3f}"
    say(
        f"{found.reviews} reviews: {len(said.all)} runs and calls have the score {name!r}, "
        f"{several} of them by several reviewers, {len(said.all) - len(said.used)} left out "
        f"because they disagree; {said.taken_back} taken back; {found.corrections} corrections"
    )
    say(f"agreement of reviewers: Krippendorff's alpha {alpha} (1 is all, 0 is chance)")
    if found.judges:
        console.print(agreement_table(found.judges))
    for judge, one in found.judges.items():
        say(f"{judge}: {trust(one)}")
    if found.across:
        say(
            "No scenario has two reviewed runs: runs of different scenarios were compared. That "
            "is right for absolute scores, not for a judge that ranks siblings (RULER)."
        )
    if found.not_compared:
        say(f"fewer than two reviewed runs have: {', '.join(found.not_compared)}")


@app.command()
def calibrate(
    score: Annotated[str, typer.Argument(help="A judge's score of runs, such as ruler.")],
    policy: Annotated[str | None, typer.Option(help="Only runs with a call of it.")] = None,
    name: ScoreName = HUMAN_REWARD,
    bands: Annotated[int, typer.Option(min=1, max=20, help="Of as many runs each.")] = 4,
    good: Annotated[
        float, typer.Option(help="From here on a run is good, by the judge and by people.")
    ] = 0.5,
    at_least: Annotated[
        float,
        typer.Option(min=0, max=1, help="A trusted band's rate of agreement lies above this."),
    ] = 0.5,
    keep: Annotated[
        bool, typer.Option("--keep", help="Let trusted scores count as verdicts, which train.")
    ] = False,
    base_url: BaseUrl = None,
) -> None:
    """Take a judge's scores for training where it agrees with people; where not, ask people.

    Runs are put into bands by the judge's score. In each, the rate at which people and the judge
    agree that a run is good has a 95 % interval. Where it lies above --at-least, --keep makes the
    judge's score the verdict on each run that no person has reviewed: `review train` learns from
    it, and a person's verdict replaces it. The other runs stay in the queue.

    \b
    Examples:
      langchain-art review calibrate ruler
      langchain-art review calibrate ruler --at-least 0.8 --keep
    """
    from rich.table import Column, Table

    from langchain_art.review.report import calibrate_judge

    with client_of(base_url) as client:
        found = calibrate_judge(
            client, score, policy, name=name, count=bands, good=good, at_least=at_least, keep=keep
        )
    names = (score, "reviewed", "agree", "95 % interval", "not reviewed", "these are")
    columns = (Column(name, justify="right") for name in names)
    table = Table(*columns, title=f"{score} and people")
    for one in found.bands:
        rate = f"{one.agree / one.reviewed:.2f}" if one.reviewed else "-"
        between = "-" if one.interval is None else "{:.2f} to {:.2f}".format(*one.interval)
        fate = "trained" if one.trusted else "asked"
        span = f"{one.low:.3g} to {one.high:.3g}"
        table.add_row(span, str(one.reviewed), rate, between, str(len(one.open)), fate)
    console.print(table)
    if keep:
        say(f"{found.kept} scores of {score} count as verdicts, {found.taken_back} were taken back")
    asked = sum(len(one.open) for one in found.bands if not one.trusted)
    say(f"{asked} runs wait for people: on the page, or `langchain-art review push --pick random`")


def _lines(found: Pulled) -> list[str]:
    from langchain_art.review.scores import REASONS

    kept, since = found.kept, found.since
    begun = "" if since is None else f" of {since:%Y-%m-%d %H:%M} UTC and later"
    lines = [
        f"{found.read} scores read{begun}: {kept.new} new, {kept.revised} revised, "
        f"{kept.unchanged} unchanged, {kept.outdated} outdated, {len(kept.refused)} refused, "
        f"{found.left_out.total()} left out"
    ]
    for reason, words in _REFUSED.items():
        if ids := [one.id for one in kept.refused if one.reason == reason]:
            lines.append(f"  refused: {len(ids)} {words}: {', '.join(ids[:3])}")
    if found.gone:
        lines.append(f"  taken back: {len(found.gone)} whose score Langfuse has no more")
    for name, versions in kept.trained.items():
        fate = "taken back" if name in found.gone else "revised"
        lines.append(f"  {fate} after it was trained, by {', '.join(versions)}: {name}")
    for reason, count in found.left_out.most_common():
        labels = f" ({', '.join(found.labels)})" if reason == "unmapped" else ""
        lines.append(f"  left out: {count} {reason}: {REASONS[reason]}{labels}")
    return lines


_REFUSED = {
    "unknown_trajectory": "of runs that this server does not have",
    "unknown_call": "of calls that their run does not have",
}


def _json(found: Pulled) -> dict[str, Any]:
    return {
        "read": found.read,
        "since": None if found.since is None else found.since.isoformat(),
        **found.kept.model_dump(mode="json"),
        "left_out": dict(found.left_out),
        "unmapped_labels": list(found.labels),
        "gone": list(found.gone),
    }
