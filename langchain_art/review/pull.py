"""`langchain-art review pull`: what people said in Langfuse, brought to the server.

A run of production that is exported by `capture` is not stored as a trajectory: the server has its
calls alone. It is stored when the first review of it is pulled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_art.errors import ConfigError
from langchain_art.export.ids import CALL, TRAJECTORY, trace_id
from langchain_art.export.langfuse_api import address, connect, observations, scores
from langchain_art.packages import replace_file
from langchain_art.review.scores import (
    SOURCE,
    LeftOut,
    Reading,
    is_empty,
    review_of,
    subject_of,
    traces_of,
)
from langchain_art.traces.from_langfuse import read_traces
from langchain_art.traces.stored import Recorder, keep_run, safe_id
from langchain_art.wire import Review, ReviewsKept

if TYPE_CHECKING:
    from langchain_art.client.sync_client import ArtClient
    from langchain_art.export.langfuse_api import LangfuseAPI, ObservationV2, ScoreV3

#: What is read again at each pull, before the newest score of the last one: a score may become
#: visible late, be revised (it keeps its timestamp), or come before its trace or its run.
OVERLAP = timedelta(days=7)


@dataclass(frozen=True)
class Pulled:
    """Result of a pull: what it read, what was kept, and what is ``gone``."""

    read: int
    kept: ReviewsKept
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Scores that are no review, by reason (`scores.REASONS`)."""
    labels: tuple[str, ...] = ()
    """The labels of those that were left out as ``unmapped``."""
    since: datetime | None = None
    """Older scores were not read; None: all were."""
    gone: tuple[str, ...] = ()
    """Ids of reviews whose score Langfuse has no more, of those of a pull of everything: they are
    taken back. `ReviewsKept.trained` says which versions were trained with them."""


def pull(
    client: ArtClient,
    reading: Reading | None = None,
    *,
    root: str | Path = "out",
    everything: bool = False,
    api: LangfuseAPI | None = None,
) -> Pulled:
    """Read the scores of Langfuse, and keep them on the server as reviews.

    Idempotent: a score is known by its id, and the server keeps the latest revision of each. The
    newest timestamp that was read is noted in ``root/reviews``; the next pull begins `OVERLAP`
    before it.

    Args:
        client: of the server that has the runs.
        reading: which scores, and what labels are worth.
        root: the folder of what is noted.
        everything: read all scores, not only those since the last pull, and take back the reviews
            whose scores were deleted. A score whose trace is not there, because it is another
            project's or was deleted as a whole, is left as it is.
        api: Langfuse's; None: as the environment says.

    Raises:
        ConfigError: no keys, keys that Langfuse refuses, or a note that cannot be read.
        ServerUnreachable: Langfuse or the server gives no answer. Nothing is noted then.
    """
    api, reading = api or connect(), reading or Reading()
    note = _note(Path(root), reading)
    read_to = _read_to(note)
    since = None if everything or read_to is None else read_to - OVERLAP
    name = reading.name if reading.source == "API" else None
    found = list(scores(api, source=reading.source, name=name, since=since))
    known = traces_of(_observed(api, found))
    reviews: list[Review] = []
    left_out = Counter[str]()
    unmapped: list[ScoreV3] = []
    for score in found:
        try:
            reviews.append(review_of(score, known, reading))
        except LeftOut as reason:
            left_out[str(reason)] += 1
            if str(reason) == "unmapped":
                unmapped.append(score)
    shown = {about.run: trace for trace, about in known.items() if about.run is not None}
    _keep_runs(client, api, {one.trajectory: shown[one.trajectory] for one in reviews})
    held = client.reviews(source=SOURCE) if everything or unmapped else []
    held = [one for one in held if not one.taken_back]
    deleted = list(_deleted(held, api, found)) if everything else []
    kept = client.put_reviews([*reviews, *deleted, *_relabelled(held, unmapped)])
    if found:
        newest = min(max(one.timestamp for one in found), datetime.now(UTC))
        note.parent.mkdir(parents=True, exist_ok=True)
        replace_file(note, json.dumps({"read_to": newest.astimezone(UTC).isoformat()}).encode())
    gone = tuple(one.id for one in deleted)
    labels = tuple(sorted({str(score.value) for score in unmapped}))
    return Pulled(len(found), kept, left_out, labels, since, gone)


def _deleted(
    held: Sequence[Review], api: LangfuseAPI, found: Sequence[ScoreV3]
) -> Iterator[Review]:
    """The server's reviews, of those `held`, of scores that Langfuse has no more, as deleted ones.

    Only the scores of one source, and maybe name, were read: those of the others are looked for.
    """
    there = {safe_id(score.id) for score in found if not is_empty(score)}
    missing = [one for one in held if one.id not in there]
    for name in {one.name for one in missing}:
        others = scores(api, source="ANNOTATION,API", name=name)
        there |= {safe_id(score.id) for score in others if not is_empty(score)}
    missing = [one for one in missing if one.id not in there]
    traces = {trace_id(one.trajectory) for one in missing}
    shown = {
        one.trace_id for one in observations(api, sorted(traces), fields="core", roots_alone=True)
    }
    for one in missing:
        if trace_id(one.trajectory) in shown:
            yield _taken_back(one)


def _relabelled(held: Sequence[Review], unmapped: Sequence[ScoreV3]) -> list[Review]:
    """The server's reviews, of those `held`, whose score has a label without a value since."""
    changed = {safe_id(score.id): score.updated_at.timestamp() for score in unmapped}
    return [_taken_back(one) for one in held if changed.get(one.id, one.at) > one.at]


def _taken_back(review: Review) -> Review:
    # Its time stays: whatever Langfuse has of it later is not outdated, whoever's clock.
    taken = {"value": None, "correction": None, "comment": None, "deleted": True}
    return review.model_copy(update=taken)


def _keep_runs(client: ArtClient, api: LangfuseAPI, shown: Mapping[str, str]) -> None:
    """Store those runs (id -> trace's) of which the server has the calls alone."""
    stored = client.foresee_reviews(list(shown))
    if not (missing := [trace for run, trace in shown.items() if run not in stored]):
        return
    recorder = Recorder(client)
    for trace in read_traces(api, missing).traces:
        about = recorder.look_up(trace)
        if about.records:
            keep_run(client, trace, about, SOURCE)


def _observed(api: LangfuseAPI, found: Sequence[ScoreV3]) -> Iterator[ObservationV2]:
    """Facts to be known of the scores' traces.

    The root says which run it is; a score on an observation, and a correction, need the calls too.
    """
    needed: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for score in found:
        with suppress(LeftOut):  # counted where it is read
            trace, observation = subject_of(score)
            needed[observation is None and score.data_type != "CORRECTION"][trace] = None
    alone = [trace for trace in needed[True] if trace not in needed[False]]
    for traces, roots_alone in ((needed[False], False), (alone, True)):
        yield from observations(
            api,
            traces,
            fields="core,basic,metadata",
            expand=f"{TRAJECTORY},{CALL}",
            roots_alone=roots_alone,
        )


def _note(root: Path, reading: Reading) -> Path:
    """The file that says up to when one project's scores of one kind were read."""
    project = os.environ.get("LANGFUSE_PUBLIC_KEY", "")
    which = json.dumps([address(), project, reading.source, reading.name])
    return root / "reviews" / f"langfuse-{hashlib.sha256(which.encode()).hexdigest()[:16]}.json"


def _read_to(note: Path) -> datetime | None:
    if not note.exists():
        return None
    try:
        return datetime.fromisoformat(json.loads(note.read_text(encoding="utf-8"))["read_to"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{note} cannot be read ({error}), expected what the last pull noted. Delete it: "
            "the next pull reads all scores."
        ) from error
