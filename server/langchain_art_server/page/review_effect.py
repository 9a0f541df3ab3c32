"""The effect of a review, before it is saved: the fate of its verdict in the plan that has it."""

from __future__ import annotations

from pydantic import BaseModel

from langchain_art.errors import NotFound
from langchain_art.wire import HUMAN_REWARD, Review, ReviewTraining
from langchain_art_server.gateway.review_routes import learner_of, planned
from langchain_art_server.gateway.service import Service


class ReviewEffect(BaseModel):
    """Effect of one review if it is saved now."""

    effect: str
    """``teaches_reward`` or ``teaches_preference``: the next ``langchain-art review train`` learns
    from it. ``is_kept``: what has another name than ``human_reward`` is shown and compared, never
    trained on. Any other is its `VerdictFate`, which is why nothing learns from it."""
    policy: str | None
    """Policy that would learn; None: none."""
    revises: str | None
    """The id of this reviewer's earlier review of the same thing, which it replaces."""


async def effect_of(service: Service, review: Review) -> ReviewEffect:
    """Effect of a review by the rules of `plan_reviews`, beside what others say.

    Raises:
        NotFound: the run is not stored, or has no such call.
    """
    run = (await service.store.trajectory(review.trajectory)).trajectory
    turns = [turn for turn in run.turns if review.call_id in (None, turn.call_id)]
    if review.call_id is not None and not turns:
        raise NotFound(f"Trajectory {run.id!r} has no call {review.call_id!r}.")
    said = [one for one in await service.store.reviews.beside(run) if one.id != review.id]
    earlier = [one for one in said if _subject(one) == _subject(review)]
    policy = learner_of(turns, service.router.serving)
    kind = "correction" if review.kind == "correction" else "reward"
    if kind == "reward" and review.name != HUMAN_REWARD:
        effect = "is_kept"
    elif policy is None:
        effect = "other_model"
    else:
        beside = [one for one in said if one not in earlier]
        found, _ = await planned(service, ReviewTraining(policy=policy), [*beside, review])
        subject = (review.trajectory, review.call_id, kind)
        effect = next(
            one.fate
            for one in found.plan.verdicts
            if (one.trajectory, one.call_id, one.kind) == subject and one.fate != "revised"
        )
    if effect == "trains":
        effect = "teaches_preference" if kind == "correction" else "teaches_reward"
    return ReviewEffect(
        effect=effect,
        policy=policy if effect.startswith("teaches") else None,
        revises=earlier[0].id if earlier else None,
    )


def _subject(one: Review) -> tuple[object, ...]:
    return one.source, one.reviewer, one.trajectory, one.call_id, one.name, one.kind
