"""Reviews by people of runs and of their calls: rewards, scores and corrected replies; samples."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import pstdev
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import Field, field_validator, model_validator
from pydantic_core import from_json

from langchain_art.wire.field_hints import Options
from langchain_art.wire.identifiers import Finite, Id, Message, Name, RewardValue, Several, Wire
from langchain_art.wire.train_config import PreferenceConfig, TrainConfig
from langchain_art.wire.training import TrainJob

Pick = Literal["disagreement", "lowest", "random", "uncertain"]


class Rankable(Protocol):
    """Facts that a pick reads of a run: of a `Trajectory`, or of the server's summary of one."""

    @property
    def id(self) -> str:
        """Id of the run."""
        ...

    @property
    def scenario(self) -> str | None:
        """Key that its siblings share."""
        ...

    @property
    def scores(self) -> Mapping[str, float]:
        """Scores by name."""
        ...

    @property
    def total_return(self) -> float | None:
        """`Trajectory.total_return`."""
        ...


RunT = TypeVar("RunT", bound=Rankable)


def ranked(runs: Sequence[RunT], pick: Pick) -> list[RunT]:
    """The runs that a pick can order, those first that are to be reviewed first.

    ============  ==================================================================
    pick          first come
    ============  ==================================================================
    disagreement  runs whose scores (of judges and criteria) differ most. Each score is
                  compared by its rank among these runs; a run needs two of them
    lowest        runs with the lowest total return
    random        any, in an order by their ids: the same each time
    uncertain     runs of the scenario whose returns differ most (standard deviation);
                  it needs two runs with a return
    ============  ==================================================================

    Equal ones are in the order of `random`. A run that a pick cannot order is not in the result.
    """
    mixed = sorted(runs, key=lambda run: hashlib.sha256(run.id.encode()).digest())
    if pick == "random":
        return mixed
    if pick == "lowest":
        worth = {run.id: run.total_return for run in mixed}
        return _by(mixed, {id_: -value for id_, value in worth.items() if value is not None})
    return _by(mixed, _disagreement(mixed) if pick == "disagreement" else _uncertainty(mixed))


def _by(runs: Sequence[RunT], worth: dict[str, float]) -> list[RunT]:
    return sorted((run for run in runs if run.id in worth), key=lambda run: -worth[run.id])


def _disagreement(runs: Sequence[Rankable]) -> dict[str, float]:
    """The largest difference of two of a run's scores, each as its mean rank in [0, 1]."""
    names = {name for run in runs for name in run.scores}
    ordered = {
        name: sorted(run.scores[name] for run in runs if name in run.scores) for name in names
    }
    found: dict[str, float] = {}
    for run in runs:
        ranks = [_rank(value, ordered[name]) for name, value in run.scores.items()]
        if len(ranks) > 1:
            found[run.id] = max(ranks) - min(ranks)
    return found


def _rank(value: float, ordered: Sequence[float]) -> float:
    return (bisect_left(ordered, value) + bisect_right(ordered, value)) / (2 * len(ordered))


def _uncertainty(runs: Sequence[Rankable]) -> dict[str, float]:
    returns: dict[str, list[float]] = {}
    for run in runs:
        if run.scenario is not None and run.total_return is not None:
            returns.setdefault(run.scenario, []).append(run.total_return)
    spread = {name: pstdev(values) for name, values in returns.items() if len(values) > 1}
    return {
        run.id: spread[run.scenario]
        for run in runs
        if run.scenario in spread and run.total_return is not None
    }


#: The name of the score by which people give rewards, wherever they give them.
HUMAN_REWARD = "human_reward"
ReviewKind = Literal["reward", "score", "correction"]


def _text(part: Any) -> str:
    if part["type"] != "text" or not isinstance(part["text"], str):
        raise ValueError("no part of a text")
    return part["text"]


def _is_reply(message: Message) -> bool:
    """True if a text or calls of it can be shown to a model, and so be trained."""
    content, calls = message.get("content"), message.get("tool_calls") or []
    try:
        functions = [dict(call["function"]) for call in calls]
        given = [one.get("arguments") or "{}" for one in functions]
        objects = [from_json(one) if isinstance(one, str) else one for one in given]
        texts = [content] if isinstance(content, str) else [_text(part) for part in content or []]
    except (KeyError, TypeError, ValueError):
        return False
    named = all(isinstance(one.get("name"), str) for one in functions)
    return bool(texts or calls) and named and all(isinstance(one, dict) for one in objects)


class Review(Wire):
    """One verdict of one reviewer on a run, or on one of its calls.

    The same `id` again is a revision: the one with the later `at` holds.

    Example::

        Review(id="lf-1", source="langfuse", trajectory="t-1", kind="reward", name="human_reward",
               value=1.0, reviewer="ann", at=1_790_000_000.0)
    """

    id: Id
    """The source's own id of the verdict."""
    source: str = Field(min_length=1, max_length=64)
    """Place where it was given: ``langfuse``, ``langsmith``, ``page``, ``api``."""
    trajectory: Id
    call_id: str | None = Field(default=None, max_length=160)
    """The call that it is about; None: the whole run."""
    kind: ReviewKind
    """``reward``: what is trained on. ``score``: kept beside it, to read and to compare.
    ``correction``: the reply that the call should have given."""
    name: str = Field(min_length=1, max_length=256)
    """Name of the score: ``human_reward``."""
    value: RewardValue | None = None
    """Value of a reward or a score; None with a reward: the reviewer takes it back."""
    correction: Message | None = None
    """An assistant message in OpenAI's shape."""
    comment: str | None = Field(default=None, max_length=65_536)
    reviewer: str | None = Field(default=None, max_length=256)
    at: Annotated[Finite, Field(lt=1e11)]
    """Time when it was given or last changed: seconds since the epoch, by the source's clock.
    Milliseconds are refused: no later revision in seconds could ever replace such a review."""
    deleted: bool = False
    """True if its source has it no more: it counts as taken back, and has no value and no
    correction."""

    @model_validator(mode="after")
    def _says_what_its_kind_says(self) -> Review:
        if self.deleted:
            if not self.taken_back:
                raise ValueError("got a deleted review with a value or a correction, expected none")
            return self
        if (self.correction is not None) != (self.kind == "correction"):
            raise ValueError(
                f"got kind={self.kind!r} with correction={self.correction!r:.80}, expected a "
                "correction with kind='correction', and with no other"
            )
        if self.kind == "correction" and (self.call_id is None or self.value is not None):
            raise ValueError(
                f"got a correction with call_id={self.call_id!r}, value={self.value!r}, expected "
                "the id of the call that it corrects, and no value"
            )
        if self.kind == "score" and self.value is None:
            raise ValueError("got a score without a value, expected a number")
        if self.correction is not None and self.correction.get("role") != "assistant":
            raise ValueError(
                f"got a correction with role={self.correction.get('role')!r}, expected 'assistant'"
            )
        if self.correction is not None and not _is_reply(self.correction):
            raise ValueError(
                f"got the correction {self.correction!r:.200}, expected a text as its content, or "
                "tool_calls whose arguments are JSON objects: no other can be trained"
            )
        return self

    @property
    def taken_back(self) -> bool:
        """True if its reviewer took it back, or its source has it no more."""
        return self.value is None and self.correction is None


#: The most reviews of one request.
MAX_REVIEWS = 1000


class Reviews(Wire):
    """Reviews to keep, all at once."""

    reviews: Several[Review] = Field(max_length=MAX_REVIEWS)

    @field_validator("reviews")
    @classmethod
    def _distinct(cls, value: tuple[Review, ...]) -> tuple[Review, ...]:
        times = Counter((one.source, one.id) for one in value)
        if twice := [id_ for (_, id_), count in times.items() if count > 1][:5]:
            raise ValueError(f"got the same review twice: {twice}, expected its last revision")
        return value


class RefusedReview(Wire):
    """A review that was not kept, and why."""

    source: str
    id: Id
    reason: Literal["unknown_trajectory", "unknown_call"]
    """``unknown_trajectory``: neither stored here, nor is a call tagged with it.
    ``unknown_call``: the trajectory has no such call."""


class ReviewsKept(Wire):
    """Counts of the reviews of one request by their outcome; they add up to their number."""

    new: int = 0
    revised: int = 0
    unchanged: int = 0
    """Number kept before, word for word."""
    outdated: int = 0
    """Earlier (`Review.at`) than the one that is kept."""
    refused: Several[RefusedReview] = ()
    """Refused reviews in the order in which they were sent. Sent again when the server knows their
    trajectory, they are kept."""
    trained: dict[Id, Several[str]] = Field(default_factory=dict)
    """Id of a review that says something else now -> the versions that were trained with what it
    said."""


VerdictFate = Literal[
    "trains",
    "trained",
    "ordered",
    "held_out",
    "stale",
    "rolled_back",
    "no_scenario",
    "alone",
    "all_equal",
    "disagreement",
    "incomplete",
    "taken_back",
    "superseded",
    "other_model",
    "untrainable",
    "gone",
    "no_reply",
    "unchanged",
    "revised",
]
"""The use of a verdict in the next step by reviews (`FATES`).

Rewards that are ``trained``, ``ordered``, ``stale``, ``rolled_back`` or ``untrainable`` are still
what others are compared with."""
#: What becomes of verdicts, in words, and what can be done about it.
FATES: dict[VerdictFate, str] = {
    "trains": "are trained on",
    "trained": "were trained already",
    "ordered": "are trained by a job that has not ended",
    "held_out": "are of a held-out scenario: an evaluation ran it; name it with --held-out-too",
    "stale": "are of runs that are too many versions old: review a new run of the scenario, or "
    "correct the replies, which is trained at any age",
    "rolled_back": "are of runs of a version that a rollback discarded: review a new run, or "
    "correct the replies",
    "no_scenario": "are of runs without a scenario, which nothing can be compared with",
    "alone": "have no other reviewed run of the scenario, or call of its node, beside them",
    "all_equal": "are equal to all that they are compared with",
    "disagreement": "are such that the reviewers disagree",
    "incomplete": "lack one of the criteria",
    "taken_back": "were taken back",
    "superseded": "are of calls that the graph discarded",
    "other_model": "are of replies of another model",
    "untrainable": "are of calls whose tokens cannot be trained: `langchain-art audit` says why",
    "gone": "are of runs or calls that the server does not have",
    "no_reply": "are of calls that the graph got no reply from",
    "unchanged": "say what was sampled",
    "revised": "are of a call that a later one corrects",
}


class ReviewTraining(Options):
    """A step by reviews: ``POST /v1/reviews/plan`` says what it would train, ``…/train`` orders it.

    Example::

        ReviewTraining(policy="email-agent", config=TrainConfig(credit="call", learning_rate=1e-4))
    """

    policy: Name
    name: str = Field(default=HUMAN_REWARD, min_length=1, max_length=256)
    """The score whose values are rewards."""
    criteria: dict[str, Finite] = Field(default_factory=dict, max_length=16)
    """Several scores in place of `name`, with their weights: a reward is their weighted sum."""
    min_agreement: Finite = Field(default=0.0, le=1)
    """Reviewers who agree no more than this abstain (`statistics.agreement.verdicts`)."""
    held_out_too: Several[str] = Field(default=(), max_length=4096)
    """Held-out scenarios, or runs of them, that are trained all the same."""
    config: TrainConfig = TrainConfig(credit="call")
    """Config of the step by rewards; its `credit` is ``call``."""
    preference: PreferenceConfig = PreferenceConfig()
    """Config of the preference steps on corrected replies."""
    correction_steps: int = Field(default=4, ge=1, le=100)
    """Preference steps on the same pairs, each a job."""
    plan: str | None = Field(default=None, max_length=64)
    """`ReviewPlan.digest` of the plan that is ordered; None: the plan of now."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of a score in a reward, by its name; the names are sorted."""
        return dict(sorted(self.criteria.items())) or {self.name: 1.0}

    @model_validator(mode="after")
    def _compares_verdicts(self) -> ReviewTraining:
        if not all(self.criteria) or len("+".join(self.criteria)) > 256:
            raise ValueError(
                f"got criteria={list(self.criteria)!r:.80}, expected names of scores that have at "
                "most 256 characters together"
            )
        if self.config.credit.kind != "call":
            raise ValueError(
                f"got credit={self.config.credit.kind!r} for a step by reviews, expected 'call': a "
                "verdict is compared with its like, and teaches its run or call alone"
            )
        return self


class PlannedVerdict(Wire):
    """The use of one verdict: of a run's or a call's reward, or of a corrected reply."""

    trajectory: Id
    call_id: str | None
    kind: Literal["reward", "correction"]
    value: Finite | None = None
    """The mean of the reviewers; None of a correction, or where all took theirs back."""
    fate: VerdictFate
    trained: Several[str] = ()
    """Versions that learned from it, with this value or an earlier one, oldest first; not those
    that a rollback discarded."""


class PlannedNode(Wire):
    """The calls and corrections of one node that a step by reviews trains."""

    calls: int = 0
    """Sampled calls that learn from rewards: of the run, of their own, or both."""
    corrections: int = 0


class ReviewPlan(Wire):
    """Plan of a step by reviews: what it trains and leaves out, verdict by verdict."""

    verdicts: Several[PlannedVerdict]
    groups: Several[Several[Id]]
    """Runs of the step by rewards, by scenario."""
    rewards: dict[Id, float]
    """Run's id -> its reward in that step."""
    turns: dict[str, float]
    """Call's id -> its reward in that step."""
    compared: Several[dict[str, Several[float]]]
    """`TrainRequest.compared` of that step."""
    pairs: Several[tuple[Id, Id]]
    """Corrected reply and sampled one of each preference pair, as ids of runs, which are stored
    when the step is ordered."""
    nodes: dict[str, PlannedNode] = Field(default_factory=dict)
    """Trained calls and corrections by node; a node that is missing learns nothing."""
    digest: str = ""
    """Names this plan in `ReviewTraining.plan`."""

    def counted(self, kind: Literal["reward", "correction"]) -> Counter[VerdictFate]:
        """Number of verdicts of each kind, by fate."""
        return Counter(one.fate for one in self.verdicts if one.kind == kind)


class ReviewJobs(Wire):
    """The jobs of one step by reviews: by rewards, if any are trained, then on corrections."""

    jobs: Several[TrainJob]


class RunsToReview(Wire):
    """Runs of which ``POST /v1/reviews/foresee`` says what a verdict on each would do."""

    runs: Several[Id] = Field(max_length=1000)
