"""What people say of runs and of their calls: rewards, scores and corrected replies."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import Field, field_validator, model_validator

from langchain_art.wire.identifiers import Finite, Id, Message, RewardValue, Several, Wire

#: The name of the score by which people give rewards, wherever they give them.
HUMAN_REWARD = "human_reward"
ReviewKind = Literal["reward", "score", "correction"]


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
    """Where it was given: ``langfuse``, ``langsmith``, ``page``, ``api``."""
    trajectory: Id
    call_id: str | None = Field(default=None, max_length=160)
    """The call that it is about; None: the whole run."""
    kind: ReviewKind
    """``reward``: what is trained on. ``score``: kept beside it, to read and to compare.
    ``correction``: the reply that the call should have given."""
    name: str = Field(min_length=1, max_length=256)
    """Of the score: ``human_reward``."""
    value: RewardValue | None = None
    """Of a reward or a score; None with a reward: the reviewer takes it back."""
    correction: Message | None = None
    """An assistant message in OpenAI's shape."""
    comment: str | None = Field(default=None, max_length=65_536)
    reviewer: str | None = Field(default=None, max_length=256)
    at: Finite
    """When it was given or last changed: seconds since the epoch, by the source's clock."""

    @model_validator(mode="after")
    def _says_what_its_kind_says(self) -> Review:
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
        return self


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
    """What became of the reviews of one request; the counts add up to their number."""

    new: int = 0
    revised: int = 0
    unchanged: int = 0
    """Kept before, word for word."""
    outdated: int = 0
    """Earlier (`Review.at`) than the one that is kept."""
    refused: Several[RefusedReview] = ()
    """In the order in which they were sent. Sent again when the server knows their trajectory,
    they are kept."""
