"""`langchain-art review push`: runs for people to review, in an annotation queue of Langfuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_art.errors import ConfigError
from langchain_art.export import langfuse_api
from langchain_art.export.ids import HUMAN_REWARD, REWARD, SCENARIO, TRAJECTORY, trace_id
from langchain_art.export.stored_messages import decoded
from langchain_art.statistics.agreement import verdicts
from langchain_art.wire import Trajectory, Turn, VerdictFate
from langchain_art.wire.reviews import Pick, ranked

if TYPE_CHECKING:
    from langchain_art.client.sync_client import ArtClient
    from langchain_art.export.langfuse_api import LangfuseAPI, ObservationV2

QUEUE = "langchain-art"
#: The newest runs, and the newest traces of production, that are looked at.
AMONG = 1000
_EXPANDED = f"{TRAJECTORY},{SCENARIO}"
#: Runs whose traces are looked for at once.
_AT_ONCE = 50
#: Why a run is not queued.
REASONS = {
    "reviewed": "have a review already, on which nobody disagrees",
    "queued": "are in the queue already",
    "no_trace": "have no trace in Langfuse: they were not exported, or are not visible yet",
    "not_ordered": "have not what this pick needs (scores, or a sibling with a reward)",
}


@dataclass(frozen=True)
class Pushed:
    """Runs that were queued, and why others were not."""

    queue: str
    queued: tuple[str, ...]
    left_out: Counter[str]
    foreseen: Counter[VerdictFate]
    """The effect of a review on each of the queued runs."""


def queue_runs(
    client: ArtClient,
    pick: Pick,
    count: int = 50,
    *,
    policy: str | None = None,
    name: str = HUMAN_REWARD,
    queue: str = QUEUE,
) -> Pushed:
    """Put runs into an annotation queue, which asks people for a score.

    The score's configuration (a number from 0 to 1) and the queue are made if there are none of
    their names. A run that is in the queue is not queued again, nor is one that has a review;
    one whose reviewers disagree comes first in another queue, for a third.

    Args:
        client: of the server that has the runs. Of the newest `AMONG` runs, and of the newest
            `AMONG` traces of production with a call of a policy.
        pick: which come first; see `picks.ranked`.
        count: the most that are queued.
        policy: only runs with a call of this policy.
        name: of the score that people are asked for.
        queue: the queue's name.

    Raises:
        ConfigError: the queue of this name asks for other scores; see also `connect`.
        ServerUnreachable: Langfuse or the server gives no answer.
    """
    if count < 1:
        raise ConfigError(f"got {count=}, expected at least 1")
    api = langfuse_api.connect()
    left_out: Counter[str] = Counter()
    stored = client.trajectories(AMONG)
    runs = [*stored, *_production(api, {trace_id(run.id) for run in stored})]
    runs = [one for one in runs if policy is None or has_calls_of(one, policy)]
    said = verdicts(client.reviews(), name).all
    disputed = {one.trajectory for one in said if one.abstains}
    reviewed = {one.trajectory for one in said} - disputed
    with langfuse_api.in_words("prepare the annotation queue"):
        queue_id = _queue(api, queue, _config(api, name))
        items = langfuse_api.numbered(api.annotation_queues.list_queue_items, queue_id=queue_id)
    there = {item.object_id for item in items}
    open_runs: list[Trajectory] = []
    for run in runs:
        if run.id in reviewed:
            left_out["reviewed"] += 1
        elif trace_id(run.id) in there:
            left_out["queued"] += 1
        else:
            open_runs.append(run)
    first = [run for run in open_runs if run.id in disputed]
    ordered = [*first, *ranked([run for run in open_runs if run.id not in disputed], pick)]
    left_out["not_ordered"] = len(open_runs) - len(ordered)
    queued: list[str] = []
    for run, exported in _exported(api, ordered):
        if len(queued) == count:
            break
        if not exported:
            left_out["no_trace"] += 1
            continue
        with langfuse_api.in_words("queue a run"):
            kind: Any = "TRACE"
            api.annotation_queues.create_queue_item(
                queue_id, object_id=trace_id(run.id), object_type=kind
            )
        queued.append(run.id)
    foreseen = Counter(client.foresee_reviews(queued).values())
    return Pushed(queue, tuple(queued), +left_out, foreseen)


def has_calls_of(run: Trajectory, policy: str) -> bool:
    """True if a policy answered a call of a run."""
    return any((turn.model or "").partition("@")[0] == policy for turn in run.turns)


def _production(api: LangfuseAPI, known: set[str]) -> list[Trajectory]:
    """Runs of production but for the traces `known`, as far as a pick reads them."""
    newest = list(langfuse_api.roots(api, None, "production", AMONG))
    if not newest:
        return []
    calls: dict[str, list[ObservationV2]] = {
        one.trace_id: [] for one in newest if one.trace_id and one.trace_id not in known
    }
    for one in langfuse_api.observations(
        api, calls, fields="core,basic,metadata,model", expand=_EXPANDED
    ):
        calls[str(one.trace_id)].append(one)
    values: dict[str, dict[str, float]] = {trace: {} for trace in calls}
    since = min(one.start_time for one in newest)
    for score in langfuse_api.scores(api, source="API", environment="production", since=since):
        if score.subject is not None and score.data_type == "NUMERIC":
            values.get(score.subject.id, {}).setdefault(score.name, float(score.value))
    found: list[Trajectory] = []
    for trace, parts in calls.items():
        metadata = next((one.metadata for one in parts if one.is_root_observation), None) or {}
        run, scenario = decoded(metadata.get(TRAJECTORY)), decoded(metadata.get(SCENARIO))
        models = [one.model for one in parts if one.model is not None and "@" in one.model]
        if run is not None and models:
            turns = tuple(Turn(model=model) for model in models)
            given = values[trace]
            reward = given.pop(REWARD, None)
            found.append(
                Trajectory(id=run, scenario=scenario, turns=turns, reward=reward, scores=given)
            )
    return found


def _exported(api: LangfuseAPI, runs: Sequence[Trajectory]) -> Iterator[tuple[Trajectory, bool]]:
    """The runs, and whether Langfuse has their traces: read as far as it is asked."""
    for start in range(0, len(runs), _AT_ONCE):
        some = runs[start : start + _AT_ONCE]
        traces = [trace_id(run.id) for run in some]
        there = {one.trace_id for one in langfuse_api.observations(api, traces, fields="core")}
        yield from ((run, trace_id(run.id) in there) for run in some)


def _config(api: LangfuseAPI, name: str) -> str:
    for one in langfuse_api.numbered(api.score_configs.get):
        if one.name == name and not one.is_archived:
            return one.id
    about = "How good the run is: 0 is useless, 1 could not be better."
    kind: Any = "NUMERIC"
    made = api.score_configs.create(
        name=name, data_type=kind, min_value=0, max_value=1, description=about
    )
    return made.id


def _queue(api: LangfuseAPI, name: str, config: str) -> str:
    """The id of the queue, which asks for the score; made if there is none."""
    for one in langfuse_api.numbered(api.annotation_queues.list_queues):
        if one.name != name:
            continue
        if config not in one.score_config_ids:
            raise ConfigError(
                f"got the annotation queue {name!r}, which does not ask for this score. Add the "
                "score to it in Langfuse, or give another queue with --queue."
            )
        return one.id
    made = api.annotation_queues.create_queue(name=name, score_config_ids=[config])
    return made.id
